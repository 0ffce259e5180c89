"""File format of a rubric set.

In: parsed YAML. Out: a :class:`~refiner_core.rubrics.rows.RubricSet`, or all its
faults. Loading a set raises at the first fault; checking a file shows each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from refiner_core.rubrics.rows import MAX_WEIGHT, Rubric, RubricSet

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
