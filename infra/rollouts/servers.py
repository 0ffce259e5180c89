"""Rollout servers as children of a trainer's attempt: started, replaced, ended with it.

In: the recipe and what each server has for itself. Out: addresses on loopback, once they answer.
Each runs under :mod:`infra.process.minder` in a session of its own, so that none outlives the
trainer, however it ends. They are started with ``VLLM_SERVER_DEV_MODE=1``, which opens the routes
that change weights, and with a middleware of ours that asks for the key on all of them.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from infra.process.leftovers import kill_leftovers
from infra.rollouts.command import SHUTDOWN_S, Place, rollout_environment, rollout_server_text
from infra.rollouts.memory import note_shared, shared_memory
from infra.services.command import Listening
from infra.services.process import PortTaken, ServerProcess, Words, free_port
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, KilledError, StageFailed
from refiner_core.contract.types import Endpoint

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_POLL_S = 0.1
_PROBE_S = 10.0
_PORTS_TRIED = 5
#: Time to end by itself, beyond what it takes for requests under way.
_GRACE_S = SHUTDOWN_S + 10.0


class LocalRolloutServers:
    """A :class:`~refiner_core.contract.types.RolloutServers` on this node.

    Parameters
    ----------
    config
        ``grpo``, ``model`` and ``seed`` of it.
    places
        One per server.
    memory
        A folder that is removed however this process ends
        (:func:`~infra.rollouts.memory.memory_folder`), and with it the servers' shared memory.
    should_stop
        Whether somebody wants this process to end, while it waits for a server.
    tell
        Hears, while servers start, for how many seconds they have.
    """

    def __init__(
        self,
        config: RecipeConfig,
        places: Sequence[Place],
        memory: Path,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        tell: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._config, self._places, self._memory = config, tuple(places), memory
        self._should_stop, self._tell = should_stop, tell
        self._running: list[ServerProcess] = []
        self._shared: dict[int, set[Path]] = {}
        self._replaced = 0
        self._closing = threading.Event()
        self._telling = threading.Lock()

    def start(self, weights: Path) -> list[Endpoint]:
        """Start all of them side by side."""
        self._running = [self._process(index) for index in range(len(self._places))]
        with ThreadPoolExecutor(len(self._places)) as pool:
            starts = [
                pool.submit(self._start, index, weights) for index in range(len(self._places))
            ]
            errors = [error for start in starts if (error := start.exception()) is not None]
        if errors:
            self._stop_all(0.0)
            raise errors[0]
        return [start.result() for start in starts]

    def replace(self, index: int, weights: Path, why: str) -> Endpoint:
        """End one at once and start another; not more often than ``max_restarts`` in all.

        Raises
        ------
        KilledError
            It was necessary too often.
        """
        most = self._config.grpo.rollout_server.max_restarts
        self._replaced += 1
        code = self._running[index].code
        if code is not None:
            why = f"{why} ({self._running[index].ended('while it served')})"
        self._end(index, 0.0)
        if self._replaced > most:
            raise KilledError(
                f"Rollout servers had to be replaced {self._replaced} times in this stage "
                f"(grpo.rollout_server.max_restarts={most}). The last one: {why}",
                expected="servers that last",
                fix="see their output in the stage's log; the same command goes on from the last "
                "checkpoint",
            )
        self._running[index] = self._process(index)
        return self._start(index, weights)

    def close(self) -> None:
        """End all of them; also while another thread waits for one to start."""
        self._closing.set()
        self._stop_all(_GRACE_S)

    def _stop_all(self, grace_s: float) -> None:
        if self._running:
            with ThreadPoolExecutor(len(self._running)) as pool:
                list(pool.map(lambda index: self._end(index, grace_s), range(len(self._running))))

    # ---- one server

    def _process(self, index: int) -> ServerProcess:
        many = len(self._places) > 1
        name = f"Rollout server {index}" if many else "The rollout server"
        words = Words(
            name,
            not_found="set grpo.rollout_server.python to the interpreter that has vLLM, or make "
            "`vllm` known in grpo.rollout_server.setup",
            mistake="correct grpo.rollout_server.args, and see that this vLLM knows the model",
            container="grpo.rollout_server.container",
        )
        return ServerProcess(
            words,
            key=self._places[index].key,
            prefix=f"[rollouts {index}] " if many else "[rollouts] ",
            by_daemon=bool(self._config.grpo.rollout_server.container),
        )

    def _end(self, index: int, grace_s: float) -> None:
        """End one, and give back the shared memory that it does not give back itself."""
        self._note_memory(index)
        self._running[index].stop(grace_s)
        kill_leftovers(self._places[index].mark)  # whoever minded it may have been killed with it
        for path in self._shared.pop(index, ()):
            path.unlink(missing_ok=True)

    def _note_memory(self, index: int) -> None:
        process = self._running[index].process
        if process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
            known = self._shared.setdefault(index, set())
            new = shared_memory(children) - known
            known |= new
            note_shared(self._memory, new)

    def _start(self, index: int, weights: Path) -> Endpoint:
        """Start one and wait until it answers; on another port if that is taken meanwhile."""
        place, server = self._places[index], self._running[index]
        for left in reversed(range(_PORTS_TRIED)):
            at = Listening(_HOST, free_port(_HOST))
            text = rollout_server_text(self._config, at, weights, place.transfer)
            bash = bool(self._config.grpo.rollout_server.setup)
            server.launch(text, rollout_environment(place), bash=bash)
            try:
                self._wait_until_ready(server, at, place.key)
            except PortTaken as taken:
                server.stop(0.0)
                if not left:
                    raise
                log.warning("%s; trying another one", taken.what)
            except BaseException:
                server.stop(0.0)
                raise
            else:
                self._note_memory(index)
                return Endpoint(at.url, place.key)
        raise AssertionError("unreachable")

    def _wait_until_ready(self, server: ServerProcess, at: Listening, key: str) -> None:
        began = time.monotonic()
        limit_s = self._config.grpo.rollout_server.start_timeout_s
        while True:
            if server.code is not None:
                raise server.ended("before it answered")
            if self._should_stop() or self._closing.is_set():
                raise Interrupted(
                    f"{server.words.name} was asked to end before it answered",
                    fix="run the same command again; the stage goes on from its last checkpoint",
                )
            if server.listens_at(at.port) and _status(at, "/health", key) == 200:
                break
            waited_s = time.monotonic() - began
            if waited_s > limit_s:
                raise StageFailed(
                    f"{server.words.name} has not answered within {limit_s:g} s. Its last word: "
                    f"{server.last_word()}",
                    expected="an answer by then",
                    fix="set grpo.rollout_server.start_timeout_s higher, or see what it waits for",
                )
            with self._telling:
                self._tell(waited_s)
            time.sleep(_POLL_S)
        if _status(at, "/is_paused") == 200:
            raise ConfigurationError(
                f"{server.words.name} lets everybody on this machine load weights into it.",
                expected="a server that asks for its key on every route",
                fix="take out of grpo.rollout_server.args what undoes `--middleware`",
            )
        if _status(at, "/is_paused", key) != 200:
            raise ConfigurationError(
                f"{server.words.name} runs, but has no routes for new weights.",
                expected="vLLM 0.32 or later with VLLM_SERVER_DEV_MODE=1 in its environment",
                fix="let grpo.rollout_server.container hand the environment on (docker needs "
                "`-e VLLM_SERVER_DEV_MODE -e VLLM_API_KEY -e PYTHONPATH`), or take a newer vLLM",
            )


def _status(at: Listening, route: str, key: str = "") -> int:
    """The status of a GET; 0 where nobody answers."""
    parts = urlsplit(at.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_PROBE_S)
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("GET", route, headers=headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
