"""Rubrics of rows, as values.

In: a row's rubrics in either of two forms, ``{"positive_rubrics": […], "negative_rubrics": […]}``
or the RL form ``{"query", "rubrics": [{title, description, weight}]}`` in which a negative weight
marks a negative rubric, as objects or as JSON text. Out: the first form with positive weights
(:func:`normalise_rubrics`), :class:`Rubric` values (:func:`parse_rubrics`).

File format of a rubric set.

In: parsed YAML. Out: a :class:`~refiner_core.rubrics.rows.RubricSet`, or all its
faults. Loading a set raises at the first fault; checking a file shows each.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from refiner_core.contract.errors import DataError

Polarity = Literal["positive", "negative"]

#: Limit on weights, which are relative sizes; sums of far larger ones would not be finite.
MAX_WEIGHT = 1e9

_KEYS: dict[str, Polarity] = {"positive_rubrics": "positive", "negative_rubrics": "negative"}
_FORMS = (
    '{"positive_rubrics": [{"title", "description", "weight"}], "negative_rubrics": […]} '
    'or {"rubrics": [{"title", "description", "weight"}]}, a negative weight marking a negative one'
)


@dataclass(frozen=True)
class Rubric:
    """One criterion. ``weight`` is a size (>= 0); its direction is ``polarity``.

    The description of a positive rubric describes a good answer, that of a negative one a
    bad answer. ``source`` is ``instance``, or the name of a static set.
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


def normalise_rubrics(obj: Any) -> dict[str, list[dict[str, Any]]]:
    """Normalise a row's rubrics to ``{"positive_rubrics": […], "negative_rubrics": […]}``.

    Entries have ``title``, ``description`` and ``weight`` (default 1; not below 0 in
    both lists); other keys are dropped. A negative weight makes a rubric negative in any list;
    the entries of ``negative_rubrics`` are negative with any sign. The function is
    idempotent.

    Parameters
    ----------
    obj
        Either form, as an object or as JSON text; the RL form's list alone; None, an empty text or
        an empty object for no rubrics.

    Raises
    ------
    DataError
        Names the invalid part. The caller adds file and line.
    """
    result: dict[str, list[dict[str, Any]]] = {"positive_rubrics": [], "negative_rubrics": []}
    for key, position, entry in rubric_entries(obj):
        normal, negative = normal_entry(entry, f"{key}[{position}]")
        listed_negative = _KEYS.get(key) == "negative"
        where = "negative_rubrics" if negative or listed_negative else "positive_rubrics"
        result[where].append(normal)
    return result


def parse_rubrics(obj: Any) -> tuple[Rubric, ...]:
    """The rubrics of a row as values, positive ones first. Input and errors as above."""
    normal = normalise_rubrics(obj)
    return tuple(
        Rubric(entry["title"], entry["description"], polarity, entry["weight"])
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


def rubric_entries(obj: Any) -> list[tuple[str, int, Any]]:
    """Every raw rubric of a row: the key of its list, its position there, and itself. Input and
    errors: see :func:`normalise_rubrics`."""
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
    entries: list[tuple[str, int, Any]] = []
    for key, value in lists.items():
        if value is None:
            continue
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise _unfit(f"`{key}` is of type {type(value).__name__}", f"a list; {_FORMS}")
        entries += [(key, position, entry) for position, entry in enumerate(value)]
    return entries


def normal_entry(entry: Any, where: str) -> tuple[dict[str, Any], bool]:
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
    normal = {"title": title, "description": description, "weight": abs(float(weight))}
    return normal, weight < 0


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _unfit(f"`{where}.{key}` is of type {type(value).__name__}", "text")
    return value.strip()


def _unfit(what: str, expected: str) -> DataError:
    fix = "correct it in the row; `refiner rubrics check FILE` names all errors"
    return DataError(what, expected=expected, fix=fix)


@dataclass(frozen=True)
class RubricSet:
    """A static set. The rubrics' own ``source`` is the set's name.

    Attributes
    ----------
    description, source, license
        The set's purpose, author, and licence.
    origins
        Source of each rubric, from its file; in the order of ``rubrics``.
    """

    name: str
    version: int
    rubrics: tuple[Rubric, ...]
    description: str = ""
    source: str = ""
    license: str = ""
    origins: tuple[str, ...] = ()

    def digest(self) -> str:
        """SHA-256 of the judged content: titles, descriptions, polarities, weights, in order."""
        content = [[r.title, r.description, r.polarity, r.weight] for r in self.rubrics]
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


_Said = Annotated[str, Field(min_length=1)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", str_strip_whitespace=True)


class _Entry(_Part):
    title: str | None = None
    description: _Said
    polarity: Literal["positive", "negative"] = "positive"
    weight: float = Field(1.0, ge=-MAX_WEIGHT, le=MAX_WEIGHT, allow_inf_nan=False)
    source: str | None = None
    accept: dict[_Said, _Said] | None = None  # in older files; unused

    @model_validator(mode="after")
    def _sign(self) -> _Entry:
        if self.polarity == "positive" and self.weight < 0:
            raise ValueError("its weight is below 0 (say `polarity: negative` instead)")
        return self

    def rubric(self, set_name: str) -> Rubric:
        title = self.title or self.description[:60]
        return Rubric(title, self.description, self.polarity, abs(self.weight), set_name)


class _File(_Part):
    name: _Said | None = None
    version: int = 1
    description: str | None = None
    source: str | None = None
    license: str | None = None
    rubrics: list[_Entry] = Field(min_length=1)


#: A fault: the position of the entry (None: the set as a whole), and its text.
Fault = tuple[int | None, str]


def read_set(content: Any, default_name: str) -> tuple[RubricSet | None, list[Fault]]:
    """The set in ``content``, or None with all faults.

    Parameters
    ----------
    content
        The parsed YAML of the file.
    default_name
        The name of a set without a name: that of its file.
    """
    if not isinstance(content, Mapping) or not isinstance(content.get("rubrics"), list):
        return None, [(None, "it has no list `rubrics`")]
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        found = error.errors(include_input=False)
        found.sort(key=lambda one: one["type"] != "extra_forbidden")  # typing errors say more
        return None, [_fault(one) for one in found]
    name = file.name or default_name
    made = RubricSet(
        name=name,
        version=file.version,
        rubrics=tuple(entry.rubric(name) for entry in file.rubrics),
        description=file.description or "",
        source=file.source or "",
        license=file.license or "",
        origins=tuple(entry.source or "" for entry in file.rubrics),
    )
    return made, []


def read_entry(entry: Any, set_name: str) -> Rubric | None:
    """One entry of ``rubrics``; None if it is invalid."""
    try:
        return _Entry.model_validate(entry).rubric(set_name)
    except ValidationError:
        return None


def _fault(error: Mapping[str, Any]) -> Fault:
    place = error["loc"]
    entry = place[1] if place[:1] == ("rubrics",) and len(place) > 1 else None
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    said = error.get("ctx", {}).get("error", error["msg"])  # our message without pydantic's prefix
    return entry, f"`{''.join(steps).lstrip('.')}`: {said}"
