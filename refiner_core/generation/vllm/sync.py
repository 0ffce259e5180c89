"""New weights on running servers: never half, never wrong, never taken on trust.

In: a context that yields the live model with all its weights, and a version. Out: servers that
have them, proven by a canary (:mod:`refiner_core.generation.vllm.admin`).

::

    sync ── trainer scores the canary, weights are written to a folder in memory
      │        each server: pause ─ load ─ version ─ drop prefixes ─ resume ─ canary
      │                       └────── anything fails ──────┘            │
      │                                     v                           v wrong
      └── nobody samples before      another server in its place, on the same weights; canary

The lock of the fleet is held all the time, so no rollout is asked between the first step and the
last canary: that is what a rollout waits for. The server's own pause is lifted just before the
canary, because a paused server answers nobody. One whose load has failed is never resumed: it may
say 200 and be wrong. It is ended, and another one started in its place.

The folder of the current version stays, since servers may have to be started on it.
"""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from refiner_core.contract.errors import KilledError, NoSpaceError, StageFailed
from refiner_core.contract.types import Endpoint, RolloutServers
from refiner_core.generation.completions import stop_ids
from refiner_core.generation.vllm.admin import Admin, Canary, Failed, make_canary

log = logging.getLogger(__name__)
#: Take up no request from now on. Nobody's is under way: the fleet's lock sees to that.
_PAUSE = "/pause?mode=keep"
#: Largest file of weights; host memory holds about one beside what is written.
_PART_SIZE = "2GB"
#: What configuration and tokenizer may need beside the weights, bytes.
_SMALL_FILES = 64 << 20


class WeightSync:
    """The fleet of a trainer: servers and the weights that they have.

    Parameters
    ----------
    servers
        Starts, replaces and ends them.
    folder
        A folder of this trainer's own, in memory.
    tokenizer
        Goes into the servers' folder, for stop strings.
    tolerance
        How far a canary may be off.
    window
        Tokens that the servers were started for.
    timeout_s
        How long one step of a server may take: loading, or compiling before its first answer.

    Attributes
    ----------
    busy
        Held while somebody samples, or sends weights.
    version
        That of the weights that all servers have; empty where nothing is known of them.
    stop_ids
        Tokens that end a text, by the model that was sent last.
    """

    def __init__(
        self,
        servers: RolloutServers,
        folder: Path,
        tokenizer: Any,
        *,
        tolerance: float,
        window: int,
        timeout_s: float = 1800.0,
    ) -> None:
        self.busy = threading.Lock()
        self.version = self._coming = ""
        self.stop_ids: frozenset[int] = frozenset()
        self._servers, self._folder, self._tokenizer = servers, folder, tokenizer
        self._tolerance, self._window, self._timeout_s = tolerance, window, timeout_s
        self._endpoints: list[Endpoint] = []
        self._written = 0
        self._current = folder / "weights-0"
        self._canary: Canary

    def endpoints(self) -> Sequence[Endpoint]:
        """The servers' addresses, in order.

        Raises
        ------
        RuntimeError
            No weights were sent yet, or sending the last ones failed.
        """
        if not self.version:
            raise RuntimeError("a sync() that succeeds comes before rollouts: no weights are known")
        return list(self._endpoints)

    def revive(self, index: int, why: str) -> Endpoint:
        """Replace a server by another with the current weights.

        Raises
        ------
        KilledError
            Servers had to be replaced too often.
        """
        log.warning("rollout server %d is replaced: %s", index, why)
        self._endpoints[index] = self._servers.replace(index, self._current, why)
        self._require(index)
        return self._endpoints[index]

    def sync(self, whole: AbstractContextManager[Any], version: str) -> None:
        """Give all servers the model's weights; they are started at the first call.

        Waits for a call of the generator that is under way. ``whole`` is entered once, and left as
        soon as the weights are written.

        Raises
        ------
        NoSpaceError
            The weights do not fit into memory.
        StageFailed
            A server that was started on these very weights scores otherwise than the trainer.
        KilledError
            Servers had to be replaced more often than the recipe allows.
        """
        with self.busy:
            self.version, self._coming = "", version
            self._written += 1
            before, current = self._current, self._folder / f"weights-{self._written}"
            with whole as model:
                self.stop_ids = stop_ids(model, self._tokenizer)
                self._canary = make_canary(model, self._tokenizer, self._window)
                write_folder(model, self._tokenizer, current)
            self._current = current
            if self._endpoints:
                with ThreadPoolExecutor(len(self._endpoints)) as pool:
                    failures = list(pool.map(self._reload, range(len(self._endpoints))))
                for index, why in enumerate(failures):
                    if why:
                        self.revive(index, why)
            else:
                self._endpoints = self._servers.start(current)
                for index in range(len(self._endpoints)):
                    self._require(index)
            shutil.rmtree(before, ignore_errors=True)
            self.version = version

    def _reload(self, index: int) -> str:
        """Load the current weights, make them count, lift the pause, and look whether they do: why
        it failed, or nothing."""
        admin = self._admin(index)
        try:
            admin.post(_PAUSE)
            admin.load(str(self._current))
            admin.post("/update_weight_version", {"new_version": self._coming})
            admin.forget_prefixes()
            admin.post("/resume")
            return self._wrong(admin)
        except Failed as error:
            return str(error)

    def _require(self, index: int) -> None:
        """A server that was just started must be right."""
        try:
            wrong = self._wrong(self._admin(index))
        except Failed as error:
            raise KilledError(
                f"Rollout server {index} was started and then failed: {error}",
                fix="nothing if it was killed from outside; else see its output",
            ) from error
        if wrong:
            raise StageFailed(
                f"Rollout server {index} was started on the trainer's weights, but {wrong}",
                expected="the same log-probabilities on both sides, but for rounding",
                fix="see that model.dtype and grpo.rollout_server.args (quantisation, another "
                "--dtype) mean the same; grpo.rollout_server.canary_tolerance is how much rounding "
                "may do",
            )

    def _wrong(self, admin: Admin) -> str:
        difference = admin.difference(self._canary, self._coming)
        if difference <= self._tolerance:
            return ""
        return (
            f"its log-probabilities of a fixed prompt differ from the trainer's by up to "
            f"{difference:.2g}, more than {self._tolerance:g}"
        )

    def _admin(self, index: int) -> Admin:
        return Admin(self._endpoints[index], self._timeout_s)


def write_folder(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write model, configuration and tokenizer, or nothing under that name.

    Raises
    ------
    NoSpaceError
        It does not fit; says how much it is.
    """
    part = folder.with_name(f".{folder.name}.part")
    size = sum(parameter.nbytes for parameter in model.parameters())
    free = shutil.disk_usage(folder.parent).free
    try:
        if free < size + _SMALL_FILES:
            raise OSError(errno.ENOSPC, f"{free / 2**30:.1f} GiB are free")
        part.mkdir(mode=0o700)
        model.save_pretrained(part, max_shard_size=_PART_SIZE)
        tokenizer.save_pretrained(part)
        part.rename(folder)
    except (OSError, SafetensorError) as error:
        raise NoSpaceError(
            f"New weights for the rollout servers ({size / 2**30:.2f} GiB) cannot be written to "
            f"{folder.parent}: {error}",
            expected="room in memory for two versions of the weights",
            fix="set grpo.rollout_server.weights_dir to a folder with more room, or give the job "
            "more memory (grpo.resources.memory_gb): what lies in /dev/shm counts as memory",
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
