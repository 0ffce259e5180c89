"""The judge's prompts: versioned text files, filled with untrusted text.

In: a shipped version (a folder below ``prompts/``) or a custom folder, and judge requests. Out:
the messages of one chat request. A kind of request has ``KIND.system.md`` and ``KIND.user.md``;
all rubrics of an answer in one request are the kind ``rubric_batch``.

Texts of a policy or a web page are fenced: they stand between a pair of tags whose name ends in a
digest of the text itself. A text cannot contain the closing tag of its own fence, because it would
have to contain its own digest, so it cannot end the fence and speak as instructions. Nor can it
use a chat template's tokens for the start and end of turns: their brackets are replaced. The
same request always gives the same text, which keeps judgements reproducible.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.files import readable
from refiner_core.contract.types import JudgeRequest, whole_text

BATCH = "rubric_batch"

_FOLDER = Path(__file__).parent / "prompts"
_PLACE = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_KINDS = {
    "per_rubric": ("rubric", "citation_recall", "citation_precision", "citation_needed"),
    "batched": (BATCH, "citation_recall", "citation_precision", "citation_needed"),
}
_LABELS = {
    "rubric": {"text": "answer", "reference": "criterion"},
    BATCH: {"text": "answer"},
    "citation_recall": {"text": "claim", "reference": "evidence"},
    "citation_precision": {"text": "claim", "reference": "source"},
    "citation_needed": {"text": "passage", "reference": "answer"},
}
#: Placeholders of each kind's user prompt: required and optional ones.
_PLACES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rubric": (("question", "text", "reference"), ()),
    BATCH: (("question", "text", "criteria"), ("count",)),
    "citation_recall": (("text", "reference"), ("question",)),
    "citation_precision": (("text", "reference"), ("question",)),
    "citation_needed": (("text",), ("question", "reference")),
}
#: Start and end tokens of turns and reasoning in common chat templates. Servers interpret them
#: anywhere, also between fences.
_CONTROL = re.compile(
    r"<(?=[|｜])"
    r"|<(?=/?(?:s|bos|eos|pad|unk|think|start_of_turn|end_of_turn|tool_call|tool_response)>)"
    r"|<(?=</?SYS>>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS|THINK)\])",
    re.IGNORECASE,
)
_HARMLESS = {"<": "‹", "[": "❲"}
#: Hexadecimal digits in the name of a fence: 128 bits; 48 in the older prompts.
_FENCE, _FENCE_BEFORE = 32, 12
#: Prompts held for a block, by name and form.
_retained: dict[tuple[str, str], JudgePrompts] = {}


class _Prompt(NamedTuple):
    system: str
    user: str


@dataclass(frozen=True)
class JudgePrompts:
    """Prompts as read; later edits of their folder do not change them.

    ``shipped`` prompts ask for 0, 1 or 2 only. Version 1, and folders, whose digest covers only
    their wording, keep the old fence, so that a store's answers stay valid for the same
    text.
    """

    name: str
    prompts: Mapping[str, _Prompt]
    shipped: bool

    @property
    def _fence(self) -> Callable[[str, str], str]:
        wide = self.shipped and self.name != "v1"
        return functools.partial(fence, digits=_FENCE if wide else _FENCE_BEFORE)

    def digest(self, form: str = "per_rubric") -> str:
        """SHA-256 over the prompts that a form uses; see :func:`judge_prompts_digest`."""
        used = sorted((kind, self._of(kind)) for kind in _KINDS[form])
        parts = [f"{kind}\x1f{p.system}\x1f{p.user}" for kind, p in used]
        return hashlib.sha256("\x1e".join(parts).encode()).hexdigest()

    def render(self, request: JudgeRequest) -> list[dict[str, str]]:
        """The chat messages of one request."""
        labels = _LABELS[request.kind]
        values = {
            name: self._fence(labels.get(name, name), getattr(request, name))
            for name in ("question", "text", "reference")
        }
        return _filled(self._of(request.kind), values)

    def render_batch(self, requests: Sequence[JudgeRequest]) -> list[dict[str, str]]:
        """The chat messages of all rubrics of one answer, numbered from 1.

        ``requests`` have the same question and text.
        """
        values = {
            "question": self._fence("question", requests[0].question),
            "text": self._fence("answer", requests[0].text),
            "criteria": "\n\n".join(
                f"Criterion {number}:\n{self._fence(f'criterion-{number}', request.reference)}"
                for number, request in enumerate(requests, start=1)
            ),
            "count": str(len(requests)),
        }
        return _filled(self._of(BATCH), values)

    def _of(self, kind: str) -> _Prompt:
        if kind not in self.prompts:
            raise _missing(Path(self.name), [kind])
        return self.prompts[kind]


def prompt_versions() -> tuple[str, ...]:
    """The versions of the prompts that come with refiner."""
    return tuple(sorted(p.name for p in _FOLDER.iterdir() if (p / "rubric.system.md").is_file()))


def load_judge_prompts(prompt: str, form: str = "per_rubric") -> JudgePrompts:
    """Read the prompts that a form uses.

    Parameters
    ----------
    prompt
        A shipped version, or a folder. If both exist, the version is used.
    form
        ``per_rubric`` or ``batched``.

    Raises
    ------
    ConfigurationError
        There is neither; or the folder lacks files that the form uses, or one of them cannot be
        read, or has unknown or missing placeholders.
    """
    if prompt in prompt_versions():
        return _shipped(prompt)
    if (prompt, form) in _retained:
        return _retained[prompt, form]
    folder = Path(prompt).expanduser()
    if not folder.is_dir():
        raise ConfigurationError(
            f"There are no judge prompts of version {prompt!r}, nor a folder of that name",
            expected=f"one of {', '.join(prompt_versions())}, or a folder with prompts",
            fix="correct judge.prompt",
        )
    if lacking := [kind for kind in _KINDS[form] if not _is_there(folder, kind)]:
        raise _missing(folder, lacking)
    return JudgePrompts(prompt, {kind: _read(folder, kind) for kind in _KINDS[form]}, shipped=False)


def judge_prompts_digest(version: str, form: str = "per_rubric") -> str:
    """SHA-256 over the prompts that a form uses; part of the comparability of judgements.

    For a folder it is recomputed each time, unless the prompts are held. Errors: see
    :func:`load_judge_prompts`.
    """
    return load_judge_prompts(version, form).digest(form)


@contextlib.contextmanager
def hold_judge_prompts(prompt: str, form: str, digest: str) -> Iterator[JudgePrompts]:
    """Judge with the prompts of a plan: within the block, edits of their folder change nothing.

    Raises
    ------
    ConfigurationError
        They were edited since; or see :func:`load_judge_prompts`.
    """
    prompts = load_judge_prompts(prompt, form)
    if (found := prompts.digest(form)) != digest:
        raise ConfigurationError(
            f"The judge's prompts {prompt} have changed since this was planned "
            f"({digest[:12]} then, {found[:12]} now)",
            expected="the prompts of the plan's fingerprint",
            fix="put them back, or run the recipe again, which plans with the new ones",
        )
    _retained[prompt, form] = prompts
    try:
        yield prompts
    finally:
        del _retained[prompt, form]


@functools.lru_cache(maxsize=256)
def fence(label: str, text: str, digits: int = _FENCE) -> str:
    """``text`` between tags that it cannot contain, and without tokens of chat templates and
    characters that servers refuse or cut at: NUL, and unpaired surrogates."""
    text = whole_text(text).replace("\0", "\N{REPLACEMENT CHARACTER}")
    text = _CONTROL.sub(lambda match: _HARMLESS[match[0]], text)
    tag = f"{label}-{hashlib.sha256(text.encode()).hexdigest()[:digits]}"
    return f"<{tag}>\n{text}\n</{tag}>"


def _filled(prompt: _Prompt, values: Mapping[str, str]) -> list[dict[str, str]]:
    # One pass: inserted values are not filled again.
    user = _PLACE.sub(lambda match: values.get(match[1], match[0]), prompt.user)
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, {"role": "user", "content": user}]


@functools.cache
def _shipped(version: str) -> JudgePrompts:
    folder = _FOLDER / version
    kinds = [kind for kind in _LABELS if _is_there(folder, kind)]
    return JudgePrompts(version, {kind: _read(folder, kind) for kind in kinds}, shipped=True)


def _files(folder: Path, kind: str) -> tuple[Path, Path]:
    return folder / f"{kind}.system.md", folder / f"{kind}.user.md"


def _is_there(folder: Path, kind: str) -> bool:
    return all(file.is_file() for file in _files(folder, kind))


def _missing(folder: Path, kinds: Sequence[str]) -> ConfigurationError:
    files = [file.name for kind in kinds for file in _files(folder, kind) if not file.is_file()]
    return ConfigurationError(
        f"The judge's prompts in {folder} are not complete: {', '.join(files)} not there",
        expected="all prompts that judge.form asks for, two files of each kind",
        fix=f"write them; {_FOLDER / prompt_versions()[-1]} shows how",
    )


def _read(folder: Path, kind: str) -> _Prompt:
    """One kind's prompts, with valid placeholders."""
    system_file, user_file = _files(folder, kind)
    system, user = _text(system_file), _text(user_file)
    needed, allowed = _PLACES[kind]
    shown = ", ".join(f"{{{{{name}}}}}" for name in (*needed, *allowed))
    found = set(_PLACE.findall(user))
    wrong = [f"lacks {name}" for name in needed if name not in found]
    wrong += [f"has {name}, which nothing fills in" for name in found - {*needed, *allowed}]
    if wrong:
        raise ConfigurationError(
            f"{user_file} {' and '.join(sorted(wrong))}",
            expected=f"the placeholders {shown}",
            fix="correct the file named by judge.prompt",
        )
    return _Prompt(system, user)


def _text(file: Path) -> str:
    with readable(f"The judge's prompt {file} (judge.prompt)", "a text file in UTF-8"):
        return file.read_text(encoding="utf-8").strip()
