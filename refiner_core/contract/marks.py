"""Identity and execution: the mark that every configuration field carries.

*Identity* fields decide what is computed and enter a stage's fingerprint. *Execution* fields decide
where and how it is computed and never enter it. A field that is added to an existing section later
declares ``legacy_value``: the value that all older runs had in effect. A field at its legacy value
is left out of the fingerprint, so adding an option never invalidates finished work.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
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
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

Mark = Literal["identity", "execution"]


class _Absent:
    """Sentinel: the field has existed from the first release on."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()
_KEY = "refiner"


class FieldInfo(NamedTuple):
    """What is known of one configuration field."""

    name: str
    mark: Mark
    doc: str
    legacy_value: Any
    type: Any
    default: Any


def _marked(
    mark: Mark,
    default: Any,
    doc: str,
    legacy_value: Any,
    default_factory: Callable[[], Any] | None,
) -> Any:
    metadata = {_KEY: {"mark": mark, "doc": doc, "legacy_value": legacy_value}}
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def identity(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    legacy_value: Any = ABSENT,
    default_factory: Callable[[], Any] | None = None,
) -> Any:
    """A field whose value decides what is computed; part of the fingerprint."""
    return _marked("identity", default, doc, legacy_value, default_factory)


def execution(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    default_factory: Callable[[], Any] | None = None,
) -> Any:
    """A field that decides where or how something runs; never part of the fingerprint."""
    return _marked("execution", default, doc, ABSENT, default_factory)


def section(kind: type, *, doc: str) -> Any:
    """A nested section; its own fields carry the marks."""
    return dataclasses.field(default_factory=kind, metadata={_KEY: {"mark": None, "doc": doc}})


def is_section(value_type: Any) -> bool:
    """Whether a field's type is a nested configuration section."""
    return isinstance(value_type, type) and dataclasses.is_dataclass(value_type)


@functools.cache
def walk(kind: type) -> tuple[tuple[str, FieldInfo], ...]:
    """All marked fields below ``kind`` as (dotted path, info), depth first.

    Raises
    ------
    TypeError
        A field has no mark. Every field must say whether it is identity or execution.
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
        default = f.default
        if default is dataclasses.MISSING and f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        yield (
            path,
            FieldInfo(
                f.name, meta["mark"], meta["doc"], meta["legacy_value"], hints[f.name], default
            ),
        )
