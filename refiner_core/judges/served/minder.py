"""What happens by itself while there is work: probes, pauses, deadlines, where servers are.

In: the fleet, the world around, and a tick several times a second. Out: servers that come back, a
pause that is told and counted, or the error that ends it all when it lasts too long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.errors import ConfigurationError, JudgeOutage
from refiner_core.contract.types import Endpoint
from refiner_core.http.client import Client
from refiner_core.http.fleet import Fleet, Server
from refiner_core.judges.served.usage import Counts
from refiner_core.judges.surroundings import Surroundings

log = logging.getLogger(__name__)

_LOOK_UP_EVERY_S = 1.0


class Minder:
    """Everything but ``pause`` belongs to the loop's thread.

    Parameters
    ----------
    spawn
        Runs work beside; its errors end all batches.
    """

    def __init__(
        self,
        config: JudgeConfig,
        around: Surroundings,
        fleet: Fleet,
        counts: Counts,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._config, self._around = config, around
        self._fleet, self._counts, self._spawn = fleet, counts, spawn
        self._paused_since: float | None = None
        self._looking_up, self._look_up_at = False, 0.0
        limits = (config.timeout_s, config.batch_timeout_s, config.outage_patience_s)
        self.tick_s = max(0.005, min(0.1, *(limit / 10 for limit in limits)))
        #: In words why nothing is asked now; empty while something is. Read from any thread.
        self.pause = ""

    def begin(self) -> None:
        """After a rest."""
        self._fleet.begin_anew()
        self._renew()

    def tick(self, now: float, passed: float, client: Client) -> float:
        """Look after servers; gives how long nobody could be asked since the last tick, seconds.

        Raises
        ------
        JudgeOutage
            Nobody could be asked for longer than anybody wants to wait.
        """
        for server in self._fleet.due_probes():
            self._spawn(self._probe(server, client))
        if self._fleet.up:
            self.end_pause()
            return 0.0
        if self._paused_since is None:
            self._paused_since = now
            return 0.0
        self._tell()
        self._counts.paused(passed)
        if now - self._paused_since >= self._config.outage_patience_s:
            raise _outage(self._fleet.servers, self._config)
        if self._around.endpoints is not None:
            self._renew()
        return passed

    def end_pause(self) -> None:
        """Somebody may be asked, or nobody wants to know any more."""
        if self.pause and self._paused_since is not None:
            log.info("the pause is over after %.1f s", time.monotonic() - self._paused_since)
        self._paused_since, self.pause = None, ""

    def _tell(self) -> None:
        if self.pause:
            return
        names = ", ".join(server.name for server in self._fleet.servers) or "none is known"
        patience_s = self._config.outage_patience_s
        self.pause = f"no server of the judge answers ({names}); waiting up to {patience_s:g} s"
        log.warning("%s", self.pause)

    async def _probe(self, server: Server, client: Client) -> None:
        alive = await client.alive(server)
        server.breaker.probed(alive)

    def _renew(self) -> None:
        """Look up where servers are: at once, or in a thread where that may take its time."""
        if self._around.endpoints is None:
            config = self._config
            addresses = [a for a in (config.base_url, *config.base_urls) if a]
            self._fleet.renew([Endpoint(address.rstrip("/")) for address in addresses])
        elif not self._looking_up and time.monotonic() >= self._look_up_at:
            self._looking_up = True
            self._spawn(self._look_up(self._around.endpoints))

    async def _look_up(self, endpoints: Callable[[], Sequence[Endpoint]]) -> None:
        try:
            self._fleet.renew(await asyncio.to_thread(endpoints))
        finally:
            self._looking_up = False
            self._look_up_at = time.monotonic() + _LOOK_UP_EVERY_S


def refused(server: Server, config: JudgeConfig) -> ConfigurationError:
    """A server refuses every call."""
    status = server.refused
    key = f"export {config.api_key_env}=… (judge.api_key_env names the variable)"
    expected, fix = {
        401: ("the key of that server", key),
        403: ("a key that may use that server", key),
        404: (
            "an address that ends like http://HOST:PORT/v1, and a model that is served there",
            f"judge.base_url, or judge.model ({config.model!r} now)",
        ),
    }.get(
        status,
        (
            "an OpenAI-compatible server that takes all fields of the request",
            "judge.base_url, judge.model, judge.max_tokens_field (newer OpenAI models take "
            "max_completion_tokens), judge.temperature=null (not sent), judge.extra_body, or "
            "judge.structured_output=auto (a schema only where it is taken)",
        ),
    )
    return ConfigurationError(
        f"The judge's server at {server.name} answers every call with HTTP {status}",
        expected=expected,
        fix=fix,
    )


def _outage(servers: Sequence[Server], config: JudgeConfig) -> JudgeOutage:
    tried = ", ".join(f"{s.name} ({s.last_words})" for s in servers) or "none is known"
    return JudgeOutage(
        f"No server of the judge has answered for {config.outage_patience_s:g} s: {tried}",
        expected="a server that answers; what was judged before is kept and not asked again",
        fix="start the judge's server and run the same command again "
        "(judge.outage_patience_s is how long it waits)",
    )
