"""Choice of the server that is asked next, and circuit breakers. Pure: no HTTP, the clock is given.

In: endpoints, and how calls and probes ended. Out: a server for the next call, or none.

The one with the fewest calls in flight is asked. A server whose breaker is open is left out; one
that a probe has found gets one call at a time until it is answered. A server that has never
answered anything and refuses (wrong key, path or model) is left out once all that is in flight
there has come back refused, too: a single item may be refused for what it says.

::

    closed ──enough distinct calls in a row failed──> open ──cool-down──> probing ─alive─> half_open
      ^                                                ^──────────dead─────┘                 │
      └──a call is answered──────────────────────────── or lost again: open, for longer <────┘

Distinct calls, because an item that no server can answer comes again and again: a few of them do
not make a server bad.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from refiner_core.contract.types import Endpoint

State = Literal["closed", "open", "probing", "half_open"]


#: What a call says about its server: it answered (``none``); it asked for patience (408, 429), and
#: is neither well nor ill (``busy``); it is there and ill: 500, time-out (``sick``); it is
#: not there: connection lost or refused, 502, 503, 504 (``gone``).
Trouble = Literal["none", "busy", "sick", "gone"]


@dataclass(frozen=True)
class BreakerSettings:
    """Limits of a server's breaker: it opens when ``threshold`` distinct calls have failed with no
    answer between.

    It is probed at once when it opens, then after ``first_cooldown_s``, which doubles up to
    ``longest_cooldown_s`` with each probe or trial that finds nobody.
    """

    threshold: int = 5
    first_cooldown_s: float = 0.5
    longest_cooldown_s: float = 30.0


#: What a server says that has another address, wants another key, or has no such model.
REFUSALS = frozenset({301, 302, 303, 307, 308, 401, 403, 404, 405})


class Server:
    """An endpoint, what is known about it, and its circuit breaker. Its key shows nowhere."""

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
        #: Of them, those that began while it was on trial.
        self.on_trial = 0
        #: It asked to be left alone until then.
        self.held_until = 0.0
        #: It has answered a call with 200.
        self.proved = False
        #: When it last answered anything; seconds of the fleet's clock.
        self.heard_at = float("-inf")
        #: The status with which it refused before it was proved; 0: it did not.
        self.refused = 0
        #: What it last had to say instead of a judgement, for people.
        self.last_words = "not asked yet"
        #: Distinct calls that it has turned down in a row.
        self.turned_down: set[Hashable] = set()
        #: Whether it takes a JSON schema for the reply.
        self.structured: Literal["unknown", "yes", "no"] = "unknown"

    def note(self, call: Hashable, trouble: Trouble) -> None:
        """A call has ended."""
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
        """Ask it no more until a probe has found it."""
        limits, wait_s = self._limits, 0.0
        if self._in_vain:
            wait_s = limits.first_cooldown_s * 2.0 ** (min(self._in_vain, 60) - 1)
        self._probe_at = self._clock() + min(limits.longest_cooldown_s, wait_s)
        self.state = "open"
        self._failing.clear()

    def hurry(self) -> None:
        """If it is open, probe it at once: somebody asks anew."""
        if self.state == "open":
            self._in_vain = 0
            self.open()

    def take_probe(self) -> bool:
        """Say whether a probe is due; the caller then makes one and tells :meth:`probed`."""
        if self.state != "open" or self._clock() < self._probe_at:
            return False
        self.state = "probing"
        return True

    def probed(self, alive: bool) -> None:
        """Note what the probe has found. Nothing, where a call was answered in the meantime."""
        if self.state != "probing":
            return
        if alive:
            self.state = "half_open"
        else:
            self._in_vain += 1
            self.open()

    @property
    def usable(self) -> bool:
        """Say whether any number of calls may go there."""
        return self.state == "closed" and not self.refused

    @property
    def takes_trial(self) -> bool:
        """Say whether it is on trial, and waits for its call."""
        return self.state == "half_open" and not self.on_trial and not self.refused

    def __repr__(self) -> str:
        return f"Server({self.name}, {self.state})"


class Fleet:
    """All servers of one judge."""

    def __init__(self, clock: Callable[[], float], settings: BreakerSettings | None = None) -> None:
        self.servers: list[Server] = []
        self._clock, self._settings = clock, settings or BreakerSettings()

    def renew(self, endpoints: Sequence[Endpoint]) -> None:
        """Take these; what is known about one that stays is kept."""
        known = {server.endpoint: server for server in self.servers}
        self.servers = [
            known.get(e) or Server(e, self._clock, self._settings) for e in dict.fromkeys(endpoints)
        ]

    @property
    def up(self) -> bool:
        """Whether a server is there that is not only on trial (or it is not clear that it is)."""
        return any(s.state == "closed" and (not s.refused or s.in_flight) for s in self.servers)

    @property
    def open_to_all(self) -> bool:
        """Say whether any number of calls may begin now."""
        return any(s.usable for s in self.servers)

    @property
    def open_to_one(self) -> bool:
        """Say whether a server on trial waits for its call."""
        return any(s.takes_trial for s in self.servers)

    def pick(self, avoid: Server | None = None) -> Server | None:
        """The server for the next call, ``avoid`` only if there is no other; None: nobody."""
        now = self._clock()
        best: Server | None = None
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

    def wait_s(self, server: Server) -> float:
        """How long a server has asked to be left alone; 0 where another may be asked instead."""
        now = self._clock()
        others = (other for other in self.servers if other is not server)
        if any(other.usable and other.held_until <= now for other in others):
            return 0.0
        return max(0.0, server.held_until - now)

    def begins(self, server: Server) -> bool:
        """A call goes there. True: it is the one that a server on trial is given."""
        trial = server.state == "half_open"
        server.in_flight += 1
        server.on_trial += trial
        return trial

    def ended(self, server: Server, call: Hashable, trouble: Trouble, *, trial: bool) -> bool:
        """A call has ended. True: it failed because its server is gone, and not by itself.

        A trial counts against its call: a moment before it, a probe has found the server.
        """
        server.in_flight -= 1
        server.on_trial -= trial
        server.note(call, trouble)
        return trouble == "gone" and not trial and server.state != "closed"

    def due_probes(self) -> list[Server]:
        """Servers to look at now; each answer goes to their breakers."""
        return [server for server in self.servers if server.take_probe()]

    def turned_down(self, server: Server, call: Hashable, status: int) -> bool:
        """It answered with a status that another try would not change.

        True: that says something of this call. False: it may say that nothing can be had there, and
        the call waits until that is known.
        """
        server.turned_down.add(call)
        many = len(server.turned_down) >= self._settings.threshold
        if status not in REFUSALS:
            if many and not server.proved:
                server.refused = status
            return True
        if server.proved:
            server.proved = not many  # a key that has run out: the next answer decides
            return True
        server.refused = status
        return False

    def answered(self, server: Server) -> None:
        """It answered a call with 200."""
        server.proved, server.refused, server.held_until = True, 0, 0.0
        if server.turned_down:
            server.turned_down.clear()

    def all_refuse(self) -> Server | None:
        """One of them, where every server refuses and nothing that may prove it is in flight."""
        settled = [s for s in self.servers if s.refused and not s.in_flight]
        return settled[0] if settled and len(settled) == len(self.servers) else None

    def begin_anew(self) -> None:
        """After a rest: the dead may be back, and a refusal be mended (a key is read anew)."""
        for server in self.servers:
            server.hurry()
            server.refused = 0
            server.turned_down.clear()
