"""From the content of a set's file to rubrics, and everything that keeps it from being one.

In: what YAML has made of a file. Out: a :class:`RubricSet`, or the faults, all of them. Loading a
set refuses with the first one; checking a file shows each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from refiner_core.contract.errors import DataError
from refiner_core.rubrics.row import Rubric, normalise_rubrics

SET_KEYS = ("name", "version", "description", "source", "license", "rubrics")
RUBRIC_KEYS = ("title", "description", "polarity", "weight", "source", "accept")


class Fault(NamedTuple):
    """Something that does not fit: in the entry of that position, or in the set as a whole."""

    entry: int | None
    what: str


@dataclass(frozen=True)
class RubricSet:
    """A static set. The rubrics' own ``source`` is the set's name.

    Attributes
    ----------
    description, source, license
        What the set is for, who wrote it, under which licence it may be passed on.
    origins
        Where each rubric comes from, as its file says; in the order of ``rubrics``.
    accepted
        For each rubric the warnings of ``refiner rubrics check`` that its author lives with, each
        with the reason. No part of the digest.
    """

    name: str
    version: int
    rubrics: tuple[Rubric, ...]
    description: str = ""
    source: str = ""
    license: str = ""
    origins: tuple[str, ...] = ()
    accepted: tuple[Mapping[str, str], ...] = ()

    def digest(self) -> str:
        """SHA-256 of what is judged: titles, descriptions, polarities, weights, in order."""
        content = [[r.title, r.description, r.polarity, r.weight] for r in self.rubrics]
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_set(content: Any, default_name: str) -> tuple[RubricSet | None, list[Fault]]:
    """The set in ``content``, or None with all that does not fit.

    Parameters
    ----------
    content
        What YAML has made of the file.
    default_name
        The name of a set that gives itself none: that of its file.
    """
    if not isinstance(content, Mapping) or not isinstance(content.get("rubrics"), list):
        return None, [Fault(None, "it has no list `rubrics`")]
    entries = content["rubrics"]
    faults = [Fault(None, what) for what in _unknown(content, SET_KEYS, "the set")]
    texts = {key: content.get(key) or "" for key in ("description", "source", "license")}
    for key, value in texts.items():
        if not isinstance(value, str):
            faults.append(Fault(None, f"`{key}` is of type {type(value).__name__}, not text"))
    name, version = content.get("name", default_name), content.get("version", 1)
    if not isinstance(name, str) or not name.strip():
        faults.append(Fault(None, "`name` is not text"))
    if not isinstance(version, int) or isinstance(version, bool):
        faults.append(Fault(None, "`version` is not a whole number"))
    if not entries:
        faults.append(Fault(None, "`rubrics` is empty"))
    read = [read_entry(entry, position, str(name)) for position, entry in enumerate(entries)]
    faults += [Fault(i, what) for i, (_, found) in enumerate(read) for what in found]
    if faults:
        return None, faults
    return (
        RubricSet(
            name=name,
            version=version,
            rubrics=tuple(rubric for rubric, _ in read if rubric is not None),
            description=texts["description"].strip(),
            source=texts["source"].strip(),
            license=texts["license"].strip(),
            origins=tuple(str(entry.get("source") or "") for entry in entries),
            accepted=tuple(dict(entry.get("accept") or {}) for entry in entries),
        ),
        [],
    )


def read_entry(entry: Any, position: int, set_name: str) -> tuple[Rubric | None, list[str]]:
    """One entry of ``rubrics``, and what does not fit in it; None where it is no rubric."""
    where = f"rubrics[{position}]"
    if not isinstance(entry, Mapping):
        return None, [f"`{where}` is not a mapping"]
    faults = _unknown(entry, RUBRIC_KEYS, f"`{where}`")
    faults += _side_faults(entry, where)
    polarity = entry.get("polarity", "positive")
    if polarity not in ("positive", "negative"):
        return None, [*faults, f"`{where}.polarity` is {polarity!r}, not positive or negative"]
    key = f"{polarity}_rubrics"
    try:
        entries = normalise_rubrics({key: [entry]})[key]
    except DataError as error:
        what = error.what.replace(f"{key}[0]", where)
        return None, [*faults, f"{what} (expected {error.expected})"]
    if not entries:
        return None, [
            *faults,
            f"`{where}.weight` is below 0 (say `polarity: negative` instead)",
        ]
    normal = entries[0]
    rubric = Rubric(normal["title"], normal["description"], polarity, normal["weight"], set_name)
    return rubric, faults


def _side_faults(entry: Mapping[Any, Any], where: str) -> list[str]:
    """What does not fit in the keys that are for people and for checking."""
    faults = []
    source, accept = entry.get("source"), entry.get("accept")
    if source is not None and not isinstance(source, str):
        faults.append(f"`{where}.source` is of type {type(source).__name__}, not text")
    if accept is not None and not (
        isinstance(accept, Mapping)
        and all(isinstance(text, str) and text for pair in accept.items() for text in pair)
    ):
        faults.append(f"`{where}.accept` is not a mapping from a warning's name to a reason")
    return faults


def _unknown(entry: Mapping[Any, Any], keys: tuple[str, ...], where: str) -> list[str]:
    unknown = sorted(str(key) for key in entry if key not in keys)
    if not unknown:
        return []
    return [f"{where} has unknown keys {', '.join(unknown)} (known: {', '.join(sorted(keys))})"]
