"""The judge's prompts: versioned text files, filled without trusting what is filled in.

In: a version (a folder below ``prompts/``) and a judge request. Out: the messages of one chat
request. Per kind of request there is ``KIND.system.md`` and ``KIND.user.md``.

Whatever a policy or a web page wrote is fenced: it stands between a pair of tags whose name ends in
a digest of the text itself. A text cannot hold the closing tag of its own fence, because it would
have to hold its own digest, so it cannot end the fence and speak as instructions. The same request
is the same text each time, which keeps judgements repeatable.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import NamedTuple, TypedDict

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.types import JudgeRequest

_FOLDER = Path(__file__).parent / "prompts"
_PLACE = re.compile(r"\{\{(question|text|reference)\}\}")
_KINDS = ("rubric", "citation_recall", "citation_precision", "citation_needed")
_LABELS = {
    "rubric": {"text": "answer", "reference": "criterion"},
    "citation_recall": {"text": "claim", "reference": "evidence"},
    "citation_precision": {"text": "claim", "reference": "source"},
    "citation_needed": {"text": "passage", "reference": "reference"},
}


class Message(TypedDict):
    """One chat message."""

    role: str
    content: str


class _Prompt(NamedTuple):
    system: str
    user: str


def prompt_versions() -> tuple[str, ...]:
    """The versions of the prompts that come with refiner."""
    return tuple(sorted(p.name for p in _FOLDER.iterdir() if (p / "rubric.system.md").is_file()))


def judge_prompts_digest(version: str, form: str = "per_rubric") -> str:
    """SHA-256 over the prompts that a form uses; part of what makes two judgements comparable.

    Raises
    ------
    ConfigurationError
        There is no such version.
    """
    prompts = _load(version)
    parts = [f"{kind}\x1f{p.system}\x1f{p.user}" for kind, p in sorted(prompts.items())]
    return hashlib.sha256("\x1e".join(parts).encode()).hexdigest()


def render_prompt(version: str, request: JudgeRequest) -> list[Message]:
    """The chat messages of one request. Errors as above."""
    prompt = _load(version)[request.kind]
    labels = {"question": "question", **_LABELS[request.kind]}

    def place(match: re.Match[str]) -> str:  # one pass: what is filled in is not filled again
        name = match[1]
        return fence(labels[name], str(getattr(request, name)))

    return [
        Message(role="system", content=prompt.system),
        Message(role="user", content=_PLACE.sub(place, prompt.user)),
    ]


def fence(label: str, text: str) -> str:
    """``text`` between tags that it cannot contain."""
    tag = f"{label}-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:12]}"
    return f"<{tag}>\n{text}\n</{tag}>"


@functools.cache
def _load(version: str) -> dict[str, _Prompt]:
    if version not in prompt_versions():
        raise ConfigurationError(
            f"There are no judge prompts of version {version!r}",
            expected=f"one of {', '.join(prompt_versions())}",
            fix="judge.prompt",
        )
    return {
        kind: _Prompt(_read(version, kind, "system"), _read(version, kind, "user"))
        for kind in _KINDS
    }


def _read(version: str, kind: str, part: str) -> str:
    return (_FOLDER / version / f"{kind}.{part}.md").read_text(encoding="utf-8").strip()
