"""Rubrics as values, from a row or from the content of a set's file.

In: a row's rubrics in either of two forms, ``{"positive_rubrics": […], "negative_rubrics": […]}``
or the RL form ``{"query", "rubrics": [{title, description, weight}]}`` in which a negative weight
marks a negative rubric, as objects or as JSON text; or what YAML has made of a set's file. Out: the
first form with positive weights (:func:`normalise_rubrics`), :class:`Rubric` values
(:func:`parse_rubrics`), a :class:`RubricSet` or all the faults of one. Loading a set refuses with
the first fault; checking a file shows each.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

from refiner_core.contract.errors import DataError

Polarity = Literal["positive", "negative"]

#: Weights are sizes relative to each other; sums of far larger ones would not be numbers any more.
MAX_WEIGHT = 1e9

_KEYS: dict[str, Polarity] = {"positive_rubrics": "positive", "negative_rubrics": "negative"}
_FORMS = (
    '{"positive_rubrics": [{"title", "description", "weight"}], "negative_rubrics": […]} '
    'or {"rubrics": [{"title", "description", "weight"}]}, a negative weight marking a negative one'
)


@dataclass(frozen=True)
class Rubric:
    """One criterion. ``weight`` is a size (>= 0); what it counts for or against is ``polarity``.

    The description of a positive rubric says what a good answer does, that of a negative one what a
    bad answer does. ``source`` is ``instance``, or the name of a static set.
    """

    title: str
    description: str
    polarity: Polarity = "positive"
    weight: float = 1.0
    source: str = "instance"

    @property
    def signed_weight(self) -> float:
        """The weight, below 0 for a negative rubric."""
        return -self.weight if self.polarity == "negative" else self.weight


class RubricEntry(TypedDict):
    """One rubric in normal form."""

    title: str
    description: str
    weight: float


def normalise_rubrics(obj: Any) -> dict[str, list[RubricEntry]]:
    """Bring a row's rubrics to ``{"positive_rubrics": […], "negative_rubrics": […]}``.

    Entries have ``title``, ``description`` and ``weight`` (1 where none is given; not below 0 in
    both lists); other keys are dropped. A negative weight makes a rubric negative in whichever list
    it stands; the entries of ``negative_rubrics`` are negative whatever their sign. Applying the
    function to its own result changes nothing.

    Parameters
    ----------
    obj
        Either form, as an object or as JSON text; the RL form's list alone; None, an empty text or
        an empty object for no rubrics.

    Raises
    ------
    DataError
        Naming what does not fit. The caller adds file and line.
    """
    result: dict[str, list[RubricEntry]] = {"positive_rubrics": [], "negative_rubrics": []}
    for key, position, entry in rubric_entries(obj):
        normal, negative = normal_entry(entry, f"{key}[{position}]")
        listed_negative = _KEYS.get(key) == "negative"
        where = "negative_rubrics" if negative or listed_negative else "positive_rubrics"
        result[where].append(normal)
    return result


def parse_rubrics(obj: Any, source: str = "instance") -> tuple[Rubric, ...]:
    """The rubrics of a row as values, positive ones first. Input and errors as above."""
    normal = normalise_rubrics(obj)
    return tuple(
        Rubric(entry["title"], entry["description"], polarity, entry["weight"], source)
        for key, polarity in _KEYS.items()
        for entry in normal[key]
    )


def _decode(obj: Any) -> Any:
    if not isinstance(obj, str):
        return obj
    if not obj.strip():
        return None
    try:
        return json.loads(obj)
    except json.JSONDecodeError as error:
        raise DataError(
            f"The rubrics are not JSON: {error}",
            expected=_FORMS,
            fix="write them with a JSON library (`json.dumps`)",
        ) from None


class PlacedEntry(NamedTuple):
    """One rubric as it stands in a row: the key of its list, its position there, itself."""

    key: str
    position: int
    entry: Any


def rubric_entries(obj: Any) -> list[PlacedEntry]:
    """Every rubric of a row, unread. Input and errors as of :func:`normalise_rubrics`."""
    obj = _decode(obj)
    if obj is None or obj == {}:
        return []
    if isinstance(obj, Mapping):
        known = [key for key in ("positive_rubrics", "negative_rubrics", "rubrics") if key in obj]
        if not known:
            raise _unfit(f"The rubrics have the keys {sorted(map(str, obj))}", _FORMS)
        if "rubrics" in known and len(known) > 1:
            raise _unfit(f"The rubrics mix two forms ({', '.join(known)})", _FORMS)
        lists = {key: obj[key] for key in known}
    else:
        lists = {"rubrics": obj}
    entries: list[PlacedEntry] = []
    for key, value in lists.items():
        if value is None:
            continue
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise _unfit(f"`{key}` is of type {type(value).__name__}", f"a list; {_FORMS}")
        entries += [PlacedEntry(key, position, entry) for position, entry in enumerate(value)]
    return entries


def normal_entry(entry: Any, where: str) -> tuple[RubricEntry, bool]:
    """The normal form of one entry, and whether its weight is below 0. Errors name ``where``."""
    if not isinstance(entry, Mapping):
        raise _unfit(f"`{where}` is {entry!r:.60}", "an object with a description")
    description = _text(entry, "description", where)
    if not description:
        raise _unfit(f"`{where}` has no `description`", "the criterion as text")
    weight = entry.get("weight")
    weight = 1.0 if weight is None else weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise _unfit(f"`{where}.weight` is {weight!r:.60}", "a finite number")
    if abs(weight) > MAX_WEIGHT:
        raise _unfit(f"`{where}.weight` is {weight!r:.60}", f"at most {MAX_WEIGHT:g}")
    title = _text(entry, "title", where) or description[:60]
    normal = RubricEntry(title=title, description=description, weight=abs(float(weight)))
    return normal, weight < 0


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _unfit(f"`{where}.{key}` is of type {type(value).__name__}", "text")
    return value.strip()


def _unfit(what: str, expected: str) -> DataError:
    fix = "correct it in the row; `refiner rubrics check FILE` names all that does not fit"
    return DataError(what, expected=expected, fix=fix)


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
    """Give what does not fit in the keys that are for people and for checking."""
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
