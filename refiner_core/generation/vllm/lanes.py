"""Who samples which request: a share of the work for each server, and none of it lost.

In: requests, and servers that come and go. Out: the next request for a server. Samples of one
prompt begin on one server, so that its prefix is computed once; who runs out of work takes from
who has most left. What a server had in hand when it went goes to whoever is free first.

The turns of one conversation stay on one server while it is there and has room: for its prefix too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from refiner_core.contract.types import Endpoint, GenerationRequest


@dataclass(eq=False)
class Lane:
    """One server and its share.

    ``heard_at`` is when it last answered or was given its first work (seconds of the loop's clock);
    ``held_until`` when it may be asked again after it said that it is full; ``failed`` counts
    failures in a row.
    """

    index: int
    endpoint: Endpoint
    queue: deque[int] = field(default_factory=deque)
    flying: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    up: bool = True
    heard_at: float = 0.0
    held_until: float = 0.0
    failed: int = 0


class Shares:
    """The requests that nobody has in hand."""

    def __init__(
        self, requests: Sequence[GenerationRequest], endpoints: Sequence[Endpoint]
    ) -> None:
        self.lanes = [Lane(index, endpoint) for index, endpoint in enumerate(endpoints)]
        self._back: deque[int] = deque()
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.prompt_ids, []).append(index)
        for indices in groups.values():
            min(self.lanes, key=lambda lane: len(lane.queue)).queue.extend(indices)

    def take(self, lane: Lane, *, others: bool = True) -> int | None:
        """The next request for that server, with ``others`` also of another's share; None where
        none is left."""
        if self._back:
            return self._back.popleft()
        if lane.queue or not others:
            return lane.queue.popleft() if lane.queue else None
        longest = max(self.lanes, key=lambda other: len(other.queue))
        return longest.queue.pop() if longest.queue else None

    def give_back(self, index: int) -> None:
        """It has to be asked again, of whoever is free first."""
        self._back.append(index)


class Conversations(Shares):
    """Requests that come one after the other: turns, each of a conversation."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        super().__init__((), endpoints)
        self._home: dict[int, Lane] = {}
        self._of: dict[int, int] = {}

    def add(self, index: int, conversation: int) -> None:
        """Request ``index`` is the next turn of a conversation: for the server that had the turn
        before; a new one, or one whose server is gone, for who has fewest conversations."""
        home = self._home.get(conversation)
        if home is None or not home.up:
            up = [lane for lane in self.lanes if lane.up] or self.lanes
            open_of = {lane.index: 0 for lane in up}
            for lane in self._home.values():
                if lane.index in open_of:
                    open_of[lane.index] += 1
            home = min(up, key=lambda lane: open_of[lane.index])
        self._home[conversation] = home
        self._of[index] = conversation
        home.queue.append(index)

    def take(self, lane: Lane, *, others: bool = True) -> int | None:
        """The next turn for that server, which is the conversation's from now on."""
        index = super().take(lane, others=others)
        if index is not None and self._of[index] in self._home:
            self._home[self._of[index]] = lane
        return index

    def end(self, conversation: int) -> None:
        """There are no further turns of it."""
        self._home.pop(conversation, None)
