"""Identity and execution: the mark of every configuration field.

*Identity* fields determine what is computed and enter a stage's fingerprint. *Execution* fields
determine where and how it is computed and never enter it. A field that is added to an existing
section later declares ``legacy_value``: the value in effect in all older runs (with :func:`added`,
its default). A field at its legacy value is left out of the fingerprint, so adding an option never
invalidates finished work. The declaration also has the range of a number.

>>> from pydantic.dataclasses import dataclass
>>> @dataclass(frozen=True, config=STRICT)
... class Example:
...     beta: float = identity(0.001, doc="KL coefficient")
...     log_level: str = execution("info", doc="verbosity of the log")
>>> [(path, info.mark) for path, info in walk(Example)]
[('beta', 'identity'), ('log_level', 'execution')]
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BeforeValidator, ConfigDict
from pydantic.dataclasses import is_pydantic_dataclass

#: Pydantic's mode for the sections: no conversions, no unknown fields.
STRICT = ConfigDict(strict=True, extra="forbid", defer_build=True)
#: YAML reads the bare word ``off`` as false.
OFF = BeforeValidator(lambda value: "off" if value is False else value)
Mark = Literal["identity", "execution"]


class _Absent:
    """Sentinel: the field has existed since the first release."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()
_KEY = "refiner"
#: Names of limits in a JSON Schema.
LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


class Range(NamedTuple):
    """Limits of a number: at least ``ge``, above ``gt``, at most ``le``, below ``lt``."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def holds(self, value: float) -> bool:
        """Tell whether a number lies in it."""
        above = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        below = (self.le is None or value <= self.le) and (self.lt is None or value < self.lt)
        return above and below

    @property
    def words(self) -> str:
        """Text for people; empty without limits."""
        if (self.ge, self.le) == (0, 1):
            return "a share between 0 and 1"
        if self.lt is not None:
            return f"a share {'strictly between 0 and 1' if self.gt == 0 else 'below 1'}"
        if self.gt is not None:
            above = {0.0: "zero", 1.0: "one"}.get(self.gt, f"{self.gt:g}")
            most = f", at most {self.le:g}" if self.le is not None else ""
            return f"a number above {above}{most}"
        if self.ge is None:
            return ""
        if self.le is not None:
            return f"{self.ge:g} to {self.le:g}"
        special: dict[float, str] = {0: "zero or more", -1: "zero or more, or -1 for no limit"}
        return special.get(self.ge, f"at least {self.ge:g}")


class FieldInfo(NamedTuple):
    """Facts about one configuration field."""

    name: str
    mark: Mark
    doc: str
    legacy_value: Any
    type: Any
    default: Any
    range: Range


def _marked(mark: Mark, default: Any, doc: str, legacy_value: Any, limits: Range) -> Any:
    bounds = {LIMITS[k]: v for k, v in limits._asdict().items() if v is not None}
    metadata = {
        _KEY: {"mark": mark, "doc": doc, "legacy_value": legacy_value, "range": limits},
        "description": doc,
        # Limits of numbers are checked by the plan, so that records from before a limit are read.
        "json_schema_extra": {"x-mark": mark, **bounds},
    }
    return dataclasses.field(default=default, metadata=metadata)


def identity(default: Any, *, doc: str, legacy_value: Any = ABSENT, **limits: float) -> Any:
    """A field whose value determines what is computed; part of the fingerprint. ``limits`` are
    those of :class:`Range`."""
    return _marked("identity", default, doc, legacy_value, Range(**limits))


def added(default: Any, *, doc: str, **limits: float) -> Any:
    """An identity field added later; its default is the value in effect in older runs."""
    return _marked("identity", default, doc, default, Range(**limits))


def execution(default: Any, *, doc: str, **limits: float) -> Any:
    """A field that determines where or how something runs; never part of the fingerprint."""
    return _marked("execution", default, doc, ABSENT, Range(**limits))


def section(kind: type, *, doc: str) -> Any:
    """A nested section; its own fields carry the marks."""
    metadata = {_KEY: {"mark": None, "doc": doc}, "description": doc}
    return dataclasses.field(default_factory=kind, metadata=metadata)


def is_section(value_type: Any) -> bool:
    """Tell whether a type is a section of the configuration."""
    return isinstance(value_type, type) and is_pydantic_dataclass(value_type)


def unchecked(section: Any, values: Mapping[str, Any]) -> Any:
    """A section with values that are checked already, or come from a record: another version may
    have accepted what this one refuses."""
    made = section()
    for field, value in values.items():
        object.__setattr__(made, field, value)
    return made


@functools.cache
def walk(kind: type) -> tuple[tuple[str, FieldInfo], ...]:
    """All marked fields below ``kind`` as (dotted path, info), depth first.

    Raises
    ------
    TypeError
        A field has no mark. Every field must be marked as identity or execution.
    """
    return tuple(_walk(kind, ""))


def _walk(kind: type, prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    hints = typing.get_type_hints(kind)
    for f in dataclasses.fields(kind):
        meta = f.metadata.get(_KEY)
        if meta is None:
            raise TypeError(
                f"{kind.__name__}.{f.name} has no mark: declare it with identity(...) if it "
                "changes what is computed, with execution(...) if it only changes where or how"
            )
        path = f"{prefix}{f.name}"
        if is_section(hints[f.name]):
            yield from _walk(hints[f.name], f"{path}.")
            continue
        yield path, FieldInfo(f.name, **meta, type=hints[f.name], default=f.default)
