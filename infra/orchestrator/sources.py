"""What an orchestrator works on, as it comes: members that are given, or begun when they may.

In: members. Out: a :class:`Source`. A run and a night are :class:`Given`; a sweep admits its trials
(:mod:`flows.sweeping.admission`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from infra.orchestrator.member import Member


class RequestStop(Protocol):
    """:meth:`infra.orchestrator.orchestrator.Orchestrator.request_stop`."""

    def __call__(
        self,
        reason: str,
        failure: Literal["interrupted", "cancelled"] = "interrupted",
        spared: Mapping[str, str] | None = None,
    ) -> None:
        """Ask what runs to save and end."""
        ...


class Source(Protocol):
    """Gives members to an orchestrator, and hears how they end.

    ``more``: others may come; ``at_once``: right now. ``request_stop`` is the orchestrator's, which
    sets it.
    """

    more: bool
    at_once: bool
    request_stop: RequestStop

    @property
    def shown(self) -> Collection[Member]:
        """Members whose stages are to be seen now."""
        ...

    def begin(self) -> None:
        """Called once, before anything else."""
        ...

    def admit(self, stopping: bool) -> Sequence[Member]:
        """Members that begin now; asked after each round."""
        ...

    def ended(self, member: Member, error: Exception | None) -> None:
        """Hear that every stage of a member is in a terminal state, or what broke it."""
        ...

    def end(self, error: BaseException | None) -> None:
        """Hear that nothing is left to do, or what ended the orchestrator."""
        ...

    def note(self, event: Mapping[str, Any]) -> None:
        """A line in the call's event log, from any thread."""
        ...


class Given:
    """Members that are all there from the beginning; what breaks one of them ends the call.

    Parameters
    ----------
    members
        In the order in which they get free slots.
    tell
        Hears of each that has ended.
    """

    more = at_once = False
    request_stop: RequestStop

    def __init__(
        self, members: Sequence[Member], tell: Callable[[Member], None] = lambda _: None
    ) -> None:
        self.shown, self._tell = tuple(members), tell
        self._waiting: tuple[Member, ...] = ()

    def begin(self) -> None:
        """Record all of them."""
        for member in self.shown:
            member.begin()
        self._waiting = self.shown

    def admit(self, stopping: bool) -> Sequence[Member]:
        """All of them at first, then none."""
        found, self._waiting = self._waiting, ()
        return found

    def ended(self, member: Member, error: Exception | None) -> None:
        """Tell it, or raise what broke it."""
        if error is not None:
            raise error
        self._tell(member)

    def end(self, error: BaseException | None) -> None:
        """Nothing is to be done."""

    def note(self, event: Mapping[str, Any]) -> None:
        """In the log of each."""
        for member in self.shown:
            member.note(event)
