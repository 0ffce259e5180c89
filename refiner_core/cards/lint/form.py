"""Form of a card: front matter, secrets, signs that nobody sees, NaN, commands.

In: a :class:`Document`. Out: findings. Secrets are looked for everywhere; nothing is executed.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from refiner_core.cards.facts import CONTROLS
from refiner_core.cards.lint.markdown import Document, Fence, Finding
from refiner_core.contract.checks.secrets import has_secret

_NAN = r"([-+]?\.?(?:nan|inf|infinity)(?![\w-]))"
#: Where a number should stand: behind a sign, in an interval, and in a cell at its beginning.
_IN_PROSE = re.compile(
    rf"(?:[=≈±]|\+/-)\s*{_NAN}|:\s*{_NAN}[\s.]*$|\[\s*{_NAN}\s*,|\d\s*,\s*{_NAN}\s*\]",
    re.IGNORECASE | re.MULTILINE,
)
_IN_CELL = re.compile(rf"{_NAN}\s*(?:$|[%±,\[(])", re.IGNORECASE)
#: Somebody's own folder, and what may be in a container or what everybody has: for our own cards.
_PATH = re.compile(
    r"(?<![\w.:/-])(?:/(?:home|Users|scratch|gpfs|lustre|nfs)/"
    r"(?!(?:your|user|runner)[\w-]*)[\w.~-]+|[A-Z]:\\Users\\\w+)"
)
_OF_OURS = re.compile(
    r"(?<![\w.:/-])(?:/(?:root|mnt|work|data|tmp|opt|var|home|Users|scratch|gpfs|lustre|nfs)/"
    r"[\w.~-]+|~/\.?\w[\w.-]*|[A-Z]:\\\w+)"
)


def text_findings(document: Document, *, is_ours: bool) -> Iterator[Finding]:
    """All findings that need no numbers. ``is_ours``: a card that refiner makes names no folder of
    a machine at all."""
    paths = _OF_OURS if is_ours else _PATH
    for paragraph in document.paragraphs:
        for path in paths.finditer(paragraph.text):
            yield _path(paragraph.line_of(path.start()), path)
        for found in _IN_PROSE.finditer(paragraph.without_code):
            yield _nan(paragraph.line_of(found.start(found.lastindex or 0)), found)
    for table in document.tables:
        for row in table.rows:
            yield from (_path(row.line, m) for c in row.cells for m in paths.finditer(c.text))
            for cell in row.cells[1:]:
                if said := _IN_CELL.match(cell.text) or _IN_PROSE.search(cell.text):
                    yield _nan(row.line, said)
    yield from _signs(document)


def _path(line: int, found: re.Match[str]) -> Finding:
    message = f"{found.group()} is a path of some machine"
    return Finding(line, "machine-path", message, "name what others can get")


def _nan(line: int, found: re.Match[str]) -> Finding:
    message = f"{found[found.lastindex or 0]!r} stands where a number should"
    return Finding(line, "not-finite", message, "a number that was not computed is a dash")


def _signs(document: Document) -> Iterator[Finding]:
    """Secrets, but for those of the front matter, and characters that nobody sees."""
    front = document.front.count("\n") + 3 if document.front is not None else 0
    for number, line in enumerate(document.text.split("\n"), start=1):
        if number > front and has_secret(line):
            what = "something looks like an access token or key"
            yield Finding(number, "secret", what, "take it out, and revoke it")
        if found := CONTROLS.search(line):
            yield Finding(
                number,
                "control-character",
                f"the character U+{ord(found.group()):04X} is shown by nobody: what a reader sees "
                "here is not what stands here",
                "take it out",
            )


#: Characters of a front matter; YAML is slow to read.
_LARGEST = 100_000
_REQUIRED = {"license": "licence-missing", "base_model": "base-model-missing"}
_PLUS_MINUS = re.compile(r"[-+]?\d+(?:\.\d+)?\s*(?:±|\+/-)\s*\d+(?:\.\d+)?")
_INDEX_VALUE = re.compile(
    r"(?P<metric>(?P<result>model-index\[\d+\]\.results\[\d+\])\.metrics\[\d+\])\.value"
)
_NO_NUMBER = re.compile(r"[-+]?\.?(?:nan|inf(?:inity)?)", re.IGNORECASE)


class _Loader(yaml.SafeLoader):
    """Reads no aliases: a few lines of them stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse an alias where it stands."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "it has an alias, which cards need none of", event.start_mark
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


@dataclass(frozen=True)
class IndexValue:
    """One number of ``model-index``, as it is written, with its line in the file."""

    text: str
    line: int
    type: str = ""
    name: str = ""
    dataset: str = ""


@dataclass
class Front:
    """The numbers of ``model-index``, and what is wrong."""

    index: list[IndexValue] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def read_front(block: str | None, first_line: int, *, unknown_base: bool = False) -> Front:
    """Read the front matter.

    Parameters
    ----------
    block
        The text; None where there is none.
    first_line
        Line of the file that it begins in.
    unknown_base
        The card says that nobody has recorded the base model.
    """
    front = Front()

    def refused(line: int, what: str, fix: str = "") -> Front:
        front.findings.append(Finding(line, "front-matter", what, fix))
        return front

    if block is None:
        missing = "there is no front matter (a block between two lines of ---)"
        return refused(1, missing, "begin the file with one: license, base_model, …")
    if len(block) > _LARGEST:
        size = f"{len(block)} characters, at most {_LARGEST} are read"
        return refused(1, f"the front matter has {size}")
    try:
        loader = _Loader(block)
        node = loader.get_single_node()
        matter = loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        line = first_line + (mark.line if mark else 0)
        return refused(line, f"the front matter is not YAML: {reason}")
    if not isinstance(matter, dict) or not isinstance(node, yaml.MappingNode):
        return refused(first_line, "the front matter is not a mapping")
    front.index = list(_index_values(node, first_line))
    front.findings += _missing(matter, unknown_base)
    front.findings += _leaf_findings(node, first_line)
    return front


def _missing(matter: dict[str, Any], unknown_base: bool) -> Iterator[Finding]:
    for key, rule in _REQUIRED.items():
        if not matter.get(key):
            open_about_it = key == "base_model" and unknown_base
            yield Finding(
                1,
                rule,
                f"the front matter has no {key}",
                f"add `{key}:`",
                "warning" if open_about_it else "error",
            )


def _leaf_findings(root: yaml.Node, first_line: int) -> Iterator[Finding]:
    for path, node in _leaves(root, ""):
        line, text, tag = first_line + node.start_mark.line, node.value, node.tag
        where = f"{path} in the front matter"
        is_value = path.startswith("model-index") and path.endswith(".value")
        if tag.endswith(":float") and not math.isfinite(_float(text)):
            yield Finding(line, "not-finite", f"{where} is not a finite number")
        elif has_secret(text):
            yield Finding(
                line, "secret", f"{where} looks like a secret", "take it out, and revoke it"
            )
        elif is_value and tag.endswith(":str") and _NO_NUMBER.fullmatch(text.strip()):
            yield Finding(line, "not-finite", f"{where} is not a finite number")
        elif is_value and not tag.endswith((":float", ":int")) and not _PLUS_MINUS.fullmatch(text):
            yield Finding(line, "not-a-number", f"{where} is not a number")


def _float(text: str) -> float:
    try:
        return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan").lower())
    except ValueError:
        return math.nan if "nan" in text.lower() else math.inf if "inf" in text.lower() else 0.0


def _leaves(node: yaml.Node, path: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _leaves(value, f"{path}.{key.value}" if path else str(key.value))
    elif isinstance(node, yaml.SequenceNode):
        for position, value in enumerate(node.value):
            yield from _leaves(value, f"{path}[{position}]")
    elif isinstance(node, yaml.ScalarNode):
        yield path, node


def _index_values(root: yaml.MappingNode, first_line: int) -> Iterator[IndexValue]:
    known: dict[str, yaml.ScalarNode] = {}
    for path, node in _leaves(root, ""):
        known.setdefault(path, node)
    texts = {path: str(node.value) for path, node in known.items()}
    for path, node in known.items():
        if found := _INDEX_VALUE.fullmatch(path):
            yield IndexValue(
                node.value,
                first_line + node.start_mark.line,
                texts.get(f"{found['metric']}.type", ""),
                texts.get(f"{found['metric']}.name", ""),
                texts.get(f"{found['result']}.dataset.name", ""),
            )


#: Says what is wrong with the words of a command after ``refiner``; None where nothing is.
CommandCheck = Callable[[Sequence[str]], str | None]

_SHELLS = ("bash", "sh", "shell", "zsh")
_PROMPTED = ("console", "shell-session", "terminal", "shellsession", "bash-session")
_MORE = "\\"
#: Lines of a block, and commands of a card, that are looked at.
_MOST_LINES, _MOST_COMMANDS = 300, 100
_FIX = "correct the command, and run it once as it stands there"


def command_findings(document: Document, check: CommandCheck | None) -> Iterator[Finding]:
    """All findings of all shell blocks; a block without a language counts where each line of it is
    a command of refiner."""
    left = _MOST_COMMANDS
    for fence in document.fences:
        for number, line in _commands(fence):
            problem, words = None, list[str]()
            try:
                words = _words(line)
            except ValueError as error:
                if line.startswith("refiner "):
                    problem = f"a shell cannot read it ({str(error).lower()})"
            if words[:1] == ["refiner"] and check is not None and left:
                left -= 1
                problem = check(words[1:])
            if problem:
                yield Finding(number, "command", f"`{_short(line)}`: {problem}", _FIX)


def _commands(fence: Fence) -> list[tuple[int, str]]:
    """Command lines with their numbers, those that go on joined."""
    shell, prompted = fence.language in _SHELLS, fence.language in _PROMPTED
    bare = not fence.language and any(line.startswith("refiner ") for line in fence.lines)
    if not (shell or prompted or bare):
        return []
    found: list[tuple[int, str]] = []
    going_on = False
    for number, raw in enumerate(fence.lines[:_MOST_LINES], start=fence.line + 1):
        line = raw.strip()
        if going_on:
            first, text = found[-1]
            found[-1] = (first, f"{text} {line.removesuffix(_MORE)}")
        elif prompted and not line.startswith("$ "):
            continue
        elif line and not line.startswith("#") and (not bare or line.startswith("refiner ")):
            found.append((number, line.removeprefix("$ ").removesuffix(_MORE)))
        else:
            continue
        going_on = line.endswith(_MORE)
    return found


def _words(line: str) -> list[str]:
    """The words of a command, without variables that are set in front of it."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        words = words[1:]
    return words


def _short(line: str) -> str:
    return line if len(line) <= 60 else line[:57] + "…"
