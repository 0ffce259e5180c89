"""What is wrong with a card, before anybody else reads it.

In: the text of a README.md (ours or any other). Out: one line per problem; none is a good sign.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_FENCE = re.compile(r"^```.*?^```[ \t]*$", re.DOTALL | re.MULTILINE)
_BARE_LINK = re.compile(
    r"https?://(?:www\.)?(?:github\.com|gitlab\.com|huggingface\.co|hf\.co|wandb\.ai)/?(?![\w/?#])"
)
_EMPTY_LINK = re.compile(r"\[[^\]\n]*\]\(\s*\)")
_NOT_A_NUMBER = re.compile(r"(?<![\w-])[-+]?\.?(?:nan|inf(?:inity)?)(?![\w-])", re.IGNORECASE)
_PATH = re.compile(
    r"(?<![\w.:/-])(?:/(?:home|root|tmp|Users|scratch|mnt|work|data|opt|var|gpfs|lustre|nfs)"
    r"/[\w.~-]+|~/[\w.-]+|[A-Z]:\\\w+)"
)
_SECRET = re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|[a-f0-9]{40}:[a-f0-9]{8,})")
_REQUIRED = ("license", "base_model")


def lint_card(text: str) -> list[str]:
    """Problems of a card, in the order: front matter, links, numbers, paths, secrets."""
    found = _FRONT.match(text)
    if found is None:
        return ["there is no front matter (a block between two lines of ---)", *_lint_text(text)]
    return [*_lint_front_matter(found.group(1)), *_lint_text(text[found.end() :])]


def _lint_front_matter(block: str) -> list[str]:
    try:
        matter = yaml.safe_load(block)
    except yaml.YAMLError as error:
        return [f"the front matter is not YAML: {str(error).splitlines()[0]}"]
    if not isinstance(matter, dict):
        return ["the front matter is not a mapping"]
    problems = [f"the front matter has no {key}" for key in _REQUIRED if not matter.get(key)]
    for path, value in _leaves(matter):
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{path} in the front matter is not a finite number")
        elif isinstance(value, str) and _SECRET.search(value):
            problems.append(f"{path} in the front matter looks like a secret")
        elif path.startswith("model-index") and path.endswith(".value") and _no_number(value):
            problems.append(f"{path} in the front matter is not a number")
    return problems


def _no_number(value: Any) -> bool:
    return isinstance(value, bool) or not isinstance(value, int | float)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def _lint_text(text: str) -> list[str]:
    prose = _FENCE.sub("", text)
    problems = [
        f"the link {m.group()} leads nowhere in particular" for m in _BARE_LINK.finditer(text)
    ]
    problems += [f"the link {m.group()} has no address" for m in _EMPTY_LINK.finditer(prose)]
    problems += [
        f"{m.group()!r} stands where a number should" for m in _NOT_A_NUMBER.finditer(prose)
    ]
    problems += [f"{m.group()} is a path of some machine" for m in _PATH.finditer(prose)]
    if _SECRET.search(text):
        problems.append("something looks like an access token or key")
    return problems
