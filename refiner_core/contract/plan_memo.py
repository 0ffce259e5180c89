"""What plans have in common, made once: thousands of trials of a sweep share most of their stages.

In: all that something is made of, and how it is made. Out: the same object for the same parts. A
memo changes nothing about a plan but the time and the memory that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from refiner_core.contract.planned import PlannedStage

T = TypeVar("T")


class PlanMemo:
    """Remembers what it was asked for; for as long as one sweep is planned."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._numbers: dict[tuple[Hashable, ...], int] = {}
        self._by_id: dict[tuple[int, ...], tuple[int, tuple[Hashable, ...]]] = {}

    def number(self, parts: tuple[Hashable, ...]) -> int:
        """One number for equal parts: what is made of large ones is looked up by it.

        Parts that are the same objects are known by their ids, without looking into them; the memo
        keeps them, so that no id comes twice.
        """
        ids = tuple(map(id, parts))
        if (known := self._by_id.get(ids)) is not None:
            return known[0]
        number = self._numbers.setdefault(parts, len(self._numbers))
        self._by_id[ids] = (number, parts)
        return number

    def once(self, made_of: Hashable, make: Callable[[], T]) -> T:
        """What was made of the same parts before, else what ``make`` makes of them."""
        found = self._made.get(made_of)
        if found is None:
            found = self._made[made_of] = make()
        return found

    def changed(self, stage: PlannedStage, **changes: Any) -> PlannedStage:
        """A stage that this memo has made, with some fields replaced."""
        if all(getattr(stage, name) == value for name, value in changes.items()):
            return stage
        # By identity: the memo keeps every stage that it has made, so no id comes twice.
        made_of = ("changed", id(stage), *changes.items())
        return self.once(made_of, lambda: replace(stage, **changes))
