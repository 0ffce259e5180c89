"""Who samples which request: a share of the work for each server, and none of it lost.

In: requests, and servers that come and go. Out: the next request for a server. Samples of one
prompt begin on one server, so that its prefix is computed once; who runs out of work takes from
who has most left. What a server had in hand when it went goes to whoever is free first.
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

    def take(self, lane: Lane) -> int | None:
        """The next request for that server; None where none is left."""
        if self._back:
            return self._back.popleft()
        if lane.queue:
            return lane.queue.popleft()
        longest = max(self.lanes, key=lambda other: len(other.queue))
        return longest.queue.pop() if longest.queue else None

    def give_back(self, index: int) -> None:
        """It has to be asked again, of whoever is free first."""
        self._back.append(index)
