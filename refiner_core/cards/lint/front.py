"""The front matter: what the Hub reads.

In: the text between the two lines of ``---``. Out: findings with their lines, and the numbers of
``model-index``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from refiner_core.cards.lint.findings import Finding
from refiner_core.cards.lint.text import bare_links
from refiner_core.contract.checks.secrets import has_secret

#: Characters of a front matter; YAML is slow to read.
_LARGEST = 100_000
_REQUIRED = {"license": "licence-missing", "base_model": "base-model-missing"}
_PLUS_MINUS = re.compile(r"[-+]?\d+(?:\.\d+)?\s*(?:±|\+/-)\s*\d+(?:\.\d+)?")
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
    """What was read. ``matter`` is None where it is not a mapping."""

    matter: dict[str, Any] | None = None
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
    if block is None:
        front.findings.append(
            Finding(
                1,
                "front-matter",
                "there is no front matter (a block between two lines of ---)",
                "begin the file with one: license, base_model, …",
            )
        )
        return front
    if len(block) > _LARGEST:
        what = f"the front matter has {len(block)} characters, at most {_LARGEST} are read"
        front.findings.append(Finding(1, "front-matter", what))
        return front
    try:
        loader = _Loader(block)
        node = loader.get_single_node()
        matter = loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        line = first_line + (mark.line if mark else 0)
        front.findings.append(
            Finding(line, "front-matter", f"the front matter is not YAML: {reason}")
        )
        return front
    if not isinstance(matter, dict) or not isinstance(node, yaml.MappingNode):
        front.findings.append(
            Finding(first_line, "front-matter", "the front matter is not a mapping")
        )
        return front
    front.matter = matter
    front.index = list(_index_values(node, first_line))
    front.findings += _missing(matter, unknown_base)
    front.findings += _twice(node, first_line)
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


def _twice(node: yaml.MappingNode, first_line: int) -> Iterator[Finding]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.value in seen:
            line = first_line + key.start_mark.line
            yield Finding(line, "key-twice", f"{key.value} stands twice in the front matter")
        seen.add(key.value)


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
        elif tag.endswith(":str"):
            for link in bare_links(text):
                yield Finding(line, "bare-link", f"the link {link} leads nowhere in particular")


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
    for model in _items(_get(root, "model-index")):
        for result in _items(_get(model, "results")):
            dataset = _text(_get(_get(result, "dataset"), "name"))
            for metric in _items(_get(result, "metrics")):
                value = _get(metric, "value")
                if isinstance(value, yaml.ScalarNode):
                    yield IndexValue(
                        value.value,
                        first_line + value.start_mark.line,
                        _text(_get(metric, "type")),
                        _text(_get(metric, "name")),
                        dataset,
                    )


def _get(node: yaml.Node | None, key: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == key:
                found: yaml.Node = value
                return found
    return None


def _items(node: yaml.Node | None) -> list[yaml.Node]:
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _text(node: yaml.Node | None) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""
