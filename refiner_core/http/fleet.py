"""Choice of the server for the next call, and circuit breakers. Pure: no HTTP, the clock is given.

In: endpoints, and outcomes of calls and probes. Out: a server for the next call, or none.

The server with the fewest calls in flight is chosen. A server with an open breaker is left out; one
found by a probe gets one call at a time until it answers. A server that has never
answered anything and refuses (wrong key, path or model) is left out once all its calls in flight
were refused as well: a single item may be refused because of its content.

::

    closed ──enough distinct calls in a row failed──> open ──cool-down──> probing ─alive─> half_open
      ^                                                ^──────────dead─────┘                 │
      └──a call is answered──────────────────────────── or lost again: open, for longer <────┘

Distinct calls count, because an item that no server can answer is retried again and again: a few of
them do not make a server bad.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from refiner_core.contract.types import Endpoint

State = Literal["closed", "open", "probing", "half_open"]


#: State of a server shown by a call: it answered (``none``); it asked for patience (408, 429),
#: which is neutral (``busy``); it exists but fails: 500, time-out (``sick``); it is unreachable:
#: connection lost or refused, 502, 503, 504 (``gone``).
Trouble = Literal["none", "busy", "sick", "gone"]


@dataclass(frozen=True)
class BreakerSettings:
    """Limits of a server's breaker: it opens after ``threshold`` distinct calls failed without
    an answer between.

    It is probed immediately when it opens, then after ``first_cooldown_s``, which doubles up to
    ``longest_cooldown_s`` with each failed probe or trial.
    """

    threshold: int = 5
    first_cooldown_s: float = 0.5
    longest_cooldown_s: float = 30.0


#: Statuses of a wrong address, key or model.
REFUSALS = frozenset({301, 302, 303, 307, 308, 401, 403, 404, 405})


class FleetServer:
    """An endpoint, its known state, and its circuit breaker. Its key is never shown."""

    def __init__(
        self, endpoint: Endpoint, clock: Callable[[], float], limits: BreakerSettings
    ) -> None:
        self.endpoint = endpoint
        self._clock, self._limits = clock, limits
        base = endpoint.url.rstrip("/")
        self.chat_url, self.models_url = f"{base}/chat/completions", f"{base}/models"
        parts = urlsplit(base)
        self.name = parts.hostname or base
        if parts.port:
            self.name = f"{self.name}:{parts.port}"
        self.state: State = "closed"
        self._failing: set[Hashable] = set()
        self._in_vain = 0
        self._probe_at = 0.0
        self.in_flight = 0
        #: Of them, those that started during its trial.
        self.on_trial = 0
        #: End of the pause that it requested.
        self.held_until = 0.0
        #: It answered a call with 200.
        self.proved = False
        #: Time of its last answer; seconds of the fleet's clock.
        self.answered_at = float("-inf")
        #: Status of its refusals before any success; 0: none.
        self.refused = 0
        #: Its last words instead of a judgement, for people.
        self.last_words = "not asked yet"
        #: Distinct consecutive calls that it refused.
        self.turned_down: set[Hashable] = set()
        #: Whether it supports a JSON schema for the reply.
        self.structured: Literal["unknown", "yes", "no"] = "unknown"

    def note(self, call: Hashable, trouble: Trouble) -> None:
        """Record the outcome of a call."""
        if trouble == "busy":
            return
        if trouble == "none":
            self.state, self._in_vain = "closed", 0
            self._failing.clear()
        elif self.state == "half_open" and trouble == "gone":
            self._in_vain += 1
            self.open()
        elif self.state in ("closed", "half_open"):
            self._failing.add(call)
            if len(self._failing) >= self._limits.threshold:
                self.open()

    def open(self) -> None:
        """Leave it out until a probe finds it."""
        limits, wait_s = self._limits, 0.0
        if self._in_vain:
            wait_s = limits.first_cooldown_s * 2.0 ** (min(self._in_vain, 60) - 1)
        self._probe_at = self._clock() + min(limits.longest_cooldown_s, wait_s)
        self.state = "open"
        self._failing.clear()

    def hurry(self) -> None:
        """If it is open, probe it now, for a new request."""
        if self.state == "open":
            self._in_vain = 0
            self.open()

    def take_probe(self) -> bool:
        """True if a probe is due; the caller then makes one and calls :meth:`probed`."""
        if self.state != "open" or self._clock() < self._probe_at:
            return False
        self.state = "probing"
        return True

    def probed(self, alive: bool) -> None:
        """Record a probe's result, unless a call was answered in the meantime."""
        if self.state != "probing":
            return
        if alive:
            self.state = "half_open"
        else:
            self._in_vain += 1
            self.open()

    @property
    def usable(self) -> bool:
        """True if any number of calls may go there."""
        return self.state == "closed" and not self.refused

    @property
    def takes_trial(self) -> bool:
        """True if it is on trial, without a call in flight."""
        return self.state == "half_open" and not self.on_trial and not self.refused

    def __repr__(self) -> str:
        return f"Server({self.name}, {self.state})"


class Fleet:
    """All servers of one judge."""

    def __init__(self, clock: Callable[[], float], settings: BreakerSettings | None = None) -> None:
        self.servers: list[FleetServer] = []
        self._clock, self._settings = clock, settings or BreakerSettings()

    def renew(self, endpoints: Sequence[Endpoint]) -> None:
        """Set the endpoints; the state of remaining servers is kept."""
        known = {server.endpoint: server for server in self.servers}
        self.servers = [
            known.get(e) or FleetServer(e, self._clock, self._settings)
            for e in dict.fromkeys(endpoints)
        ]

    @property
    def up(self) -> bool:
        """True if a closed server accepts calls, or may still prove to."""
        return any(s.state == "closed" and (not s.refused or s.in_flight) for s in self.servers)

    @property
    def open_to_all(self) -> bool:
        """True if any number of calls may start now."""
        return any(s.usable for s in self.servers)

    @property
    def open_to_one(self) -> bool:
        """True if a server on trial can take its call."""
        return any(s.takes_trial for s in self.servers)

    def pick(self, avoid: FleetServer | None = None) -> FleetServer | None:
        """The server for the next call, ``avoid`` only if there is no other; None without any."""
        now = self._clock()
        best: FleetServer | None = None
        rank = (2, 2, 0)
        for server in self.servers:
            if server is not avoid and server.takes_trial:
                return server
            if server.usable:
                own = (int(server.held_until > now), int(server is avoid), server.in_flight)
                if best is None or own < rank:
                    best, rank = server, own
        if best is None and avoid in self.servers and avoid is not None and avoid.takes_trial:
            return avoid
        return best

    def wait_s(self, server: FleetServer) -> float:
        """Rest of the pause that a server requested; 0 if another server is available."""
        now = self._clock()
        others = (other for other in self.servers if other is not server)
        if any(other.usable and other.held_until <= now for other in others):
            return 0.0
        return max(0.0, server.held_until - now)

    def begins(self, server: FleetServer) -> bool:
        """Record the start of a call. True if it is the call of a server on trial."""
        trial = server.state == "half_open"
        server.in_flight += 1
        server.on_trial += trial
        return trial

    def ended(self, server: FleetServer, call: Hashable, trouble: Trouble, *, trial: bool) -> bool:
        """Record the end of a call. True: it failed because its server is gone, not by itself.

        A failed trial counts against its call, since a probe has just found the server.
        """
        server.in_flight -= 1
        server.on_trial -= trial
        server.note(call, trouble)
        return trouble == "gone" and not trial and server.state != "closed"

    def due_probes(self) -> list[FleetServer]:
        """Servers to probe now; the results go to their breakers."""
        return [server for server in self.servers if server.take_probe()]

    def turned_down(self, server: FleetServer, call: Hashable, status: int) -> bool:
        """Record an answer with a status that a retry would not change.

        True: the cause is this call. False: the server may refuse every call, and the call waits
        until that is known.
        """
        server.turned_down.add(call)
        many = len(server.turned_down) >= self._settings.threshold
        if status not in REFUSALS:
            if many and not server.proved:
                server.refused = status
            return True
        if server.proved:
            server.proved = not many  # an expired key: the next answer decides
            return True
        server.refused = status
        return False

    def answered(self, server: FleetServer) -> None:
        """Record an answer with 200."""
        server.proved, server.refused, server.held_until = True, 0, 0.0
        if server.turned_down:
            server.turned_down.clear()

    def all_refuse(self) -> FleetServer | None:
        """A server, if every server refuses and no call in flight may still succeed; else None."""
        settled = [s for s in self.servers if s.refused and not s.in_flight]
        return settled[0] if settled and len(settled) == len(self.servers) else None

    def begin_anew(self) -> None:
        """Reset after a pause: servers may be back, and a refusal fixed (the key is read again)."""
        for server in self.servers:
            server.hurry()
            server.refused = 0
            server.turned_down.clear()
