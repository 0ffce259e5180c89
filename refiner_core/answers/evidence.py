"""The evidence of a prompt.

In: the user's message. Out: :class:`ParsedEvidence`, the text of each ``<snippet id=…>`` and
``<webpage id=…>`` of its tool output. Never give it an answer: claims carry the same tag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from refiner_core.answers.tags import Tag, read_attributes, scan_tags


class _Joined(Mapping[str, str]):
    """Texts by id, put together when they are asked for.

    Text that thousands of ids share is kept once, however often the same ids stand in the prompt:
    joining all of it at once could take more memory than anybody has.
    """

    def __init__(self, parts: dict[str, list[str]]) -> None:
        self._parts = parts

    def __getitem__(self, key: str) -> str:
        parts = self._parts[key]
        if len(parts) > 1:
            parts[:] = ["\n".join(parts)]
        return parts[0]

    def __contains__(self, key: object) -> bool:
        return key in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@dataclass(frozen=True)
class ParsedEvidence:
    """What may be cited.

    ``texts`` maps an id to its text, tags taken out; an id that stands at several places has their
    texts joined by line breaks. Ids are case-sensitive. ``differing`` counts ids whose texts are
    not the same at all their places: a source that writes tags can so add to another's.
    """

    texts: Mapping[str, str]
    differing: int = 0

    def __bool__(self) -> bool:
        return bool(self.texts)

    def text_of(self, ids: tuple[str, ...]) -> str:
        """The texts of the known ones among ``ids``, in that order, a blank line between them."""
        return "\n\n".join(self.texts[i] for i in ids if i in self.texts)


@dataclass
class _Open:
    """An element that is being read."""

    ids: tuple[str, ...]
    inside: bool
    around: bool = False
    pieces: list[str] = field(default_factory=list)


class _Reader:
    """One pass over the tags. At most one snippet and one web page are open at a time."""

    def __init__(self) -> None:
        self.in_tool_output = False
        self.saw_tool_output = False
        self.open: dict[str, _Open] = {}
        self.inside: list[_Open] = []
        self.anywhere: list[_Open] = []

    def text(self, piece: str) -> None:
        if piece:
            for element in self.open.values():
                element.pieces.append(piece)

    def tag(self, tag: Tag) -> None:
        if tag.name == "tool_output":
            self._tool_output(tag)
        elif tag.name in ("snippet", "webpage"):
            self._end(tag.name, properly=tag.closing)
            if not tag.closing:
                ids = read_attributes(tag.attributes).ids
                self.open[tag.name] = _Open(ids, inside=self.in_tool_output)

    def _tool_output(self, tag: Tag) -> None:
        self.in_tool_output = not tag.closing
        self.saw_tool_output = True
        for name, element in list(self.open.items()):
            if element.inside:
                self._end(name, properly=False)
            else:
                element.around = True

    def _end(self, name: str, *, properly: bool) -> None:
        element = self.open.pop(name, None)
        if element is None:
            return
        self.anywhere.append(element)
        if element.inside or (element.around and properly):
            self.inside.append(element)

    def finish(self) -> list[_Open]:
        for name in list(self.open):
            self._end(name, properly=False)
        return self.inside if self.saw_tool_output else self.anywhere


def parse_evidence(prompt: str) -> ParsedEvidence:
    """Read the evidence of a prompt, in time linear in its length.

    - Only tool output counts: elements inside ``<tool_output>``, and web pages around one. So an
      example of the notation in the instructions is no evidence. A prompt without any
      ``<tool_output>`` tag is taken to be tool output as a whole.
    - An element that is not closed (search results are cut) reaches to the next one of its kind, to
      the end of its tool output, or to the end of the prompt.
    - A web page may hold snippets: their text belongs to both.
    - An element without an id cannot be cited and is skipped.
    """
    reader = _Reader()
    position = 0
    for tag in scan_tags(prompt):
        if not tag.complete:
            continue
        reader.text(prompt[position : tag.start])
        reader.tag(tag)
        position = tag.end
    reader.text(prompt[position:])
    texts: dict[str, list[str]] = {}
    known: dict[str, str] = {}
    differing: set[str] = set()
    for element in reader.finish():
        text = "".join(element.pieces).strip()
        text = known.setdefault(text, text)  # so that equal ones are told without reading them
        for name in element.ids:
            parts = texts.setdefault(name, [])
            if parts and parts[0] is not text:
                differing.add(name)
            parts.append(text)
    return ParsedEvidence(_Joined(texts), len(differing))
