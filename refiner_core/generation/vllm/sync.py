"""New weights on running servers: never half, never wrong, never taken on trust.

In: a context that yields the live model with all its weights, and a version. Out: servers that
have them, proven by a canary (:mod:`refiner_core.generation.vllm.admin`).

::

    sync ── trainer scores the canary, weights are written or sent
      │        each server: pause ─ load ─ version ─ drop prefixes ─ resume ─ canary
      │                       └────── anything fails ──────┘            │
      │                                     v                           v wrong
      └── nobody samples before      another server in its place, on the same weights; canary

The lock of the fleet is held all the time, so no rollout is asked between the first step and the
last canary: that is what a rollout waits for. The server's own pause is lifted just before the
canary, because a paused server answers nobody. One whose load has failed is never resumed: it may
say 200 and be wrong. It is ended, and another one started in its place.

Under ``reload`` and at every start, weights go by a folder in memory; ``nccl`` and ``ipc`` send
them from GPU to GPU (:mod:`refiner_core.generation.vllm.transfer`). The folder of the current
version stays while servers may have to be started on it.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import KilledError, StageFailed
from refiner_core.contract.types import Endpoint, RolloutServers
from refiner_core.generation.completions import stop_ids
from refiner_core.generation.vllm.admin import Admin, Canary, Failed, make_canary
from refiner_core.generation.vllm.transfer import Transfer, write_folder

log = logging.getLogger(__name__)
#: Take up no request from now on. Nobody's is under way: the fleet's lock sees to that.
_PAUSE = "/pause?mode=keep"


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
    transfer
        Sends weights to servers that run; none is by folders.
    timeout_s
        How long one step of a server may take: loading, or compiling before its first answer.
    """

    def __init__(
        self,
        servers: RolloutServers,
        folder: Path,
        tokenizer: Any,
        *,
        tolerance: float,
        window: int,
        transfer: Transfer | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self.busy = threading.Lock()
        self._servers, self._folder, self._tokenizer = servers, folder, tokenizer
        self._tolerance, self._window = tolerance, window
        self._transfer, self._timeout_s = transfer, timeout_s
        self._endpoints: list[Endpoint] = []
        self._version = self._coming = ""
        self._stop_ids: frozenset[int] = frozenset()
        self._current: Path | None = None
        self._written = 0
        self._canary: Canary | None = None

    # ---- what the generator sees

    @property
    def version(self) -> str:
        """The version that all servers have."""
        return self._version

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a text, by the model that was sent last."""
        return self._stop_ids

    def endpoints(self) -> Sequence[Endpoint]:
        """The servers' addresses, in order.

        Raises
        ------
        RuntimeError
            No weights were sent yet, or sending the last ones failed.
        """
        if not self._version:
            raise RuntimeError("a sync() that succeeds comes before rollouts: no weights are known")
        return list(self._endpoints)

    def revive(self, index: int, why: str) -> Endpoint:
        """Replace a server by another with the current weights.

        Raises
        ------
        KilledError
            Its weights are nowhere but in the other servers (``nccl``, ``ipc``), or servers had to
            be replaced too often.
        """
        if self._current is None:
            raise KilledError(
                f"Rollout server {index} is lost ({why}), and its weights were sent from GPU to "
                "GPU and are in no folder",
                expected="servers that last from one step to the next",
                fix="nothing; the stage goes on from its last checkpoint. "
                "grpo.rollout_server.weight_transfer=reload keeps weights in memory meanwhile",
            )
        return self._replace(index, why, self._current)

    # ---- new weights

    def sync(self, whole: AbstractContextManager[Any], version: str) -> None:
        """Give all servers the model's weights; they are started at the first call.

        Waits for a call of the generator that is under way. ``whole`` is entered once, and left as
        soon as the weights are written or sent.

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
            before, self._version, self._coming = self._current, "", version
            by_folder = self._transfer is None or not self._endpoints
            with whole as model:
                self._stop_ids = stop_ids(model, self._tokenizer)
                self._canary = make_canary(model, self._tokenizer, self._window)
                self._current = self._write(model) if by_folder else None
                if not by_folder:
                    self._send(model)
            if by_folder:
                self._load()
            if before is not None and before != self._current:
                shutil.rmtree(before, ignore_errors=True)
            self._version = version

    def _write(self, model: Any) -> Path:
        self._written += 1
        folder = self._folder / f"weights-{self._written}"
        write_folder(model, self._tokenizer, folder)
        return folder

    def _load(self) -> None:
        assert self._current is not None
        if not self._endpoints:
            self._endpoints = self._servers.start(self._current)
            for index in range(len(self._endpoints)):
                self._require(index)
            self._drop_unused()
            return
        failures = self._each(self._reload)
        for index, why in enumerate(failures):
            if why:
                self._replace(index, why, self._current)

    def _drop_unused(self) -> None:
        """Servers hold the weights themselves; with a transfer the folder is not needed again."""
        if self._transfer is not None and self._current is not None:
            shutil.rmtree(self._current, ignore_errors=True)
            self._current = None

    def _send(self, model: Any) -> None:
        """From GPU to GPU; servers that fail are replaced by others, on a folder."""
        assert self._transfer is not None
        admins = [self._admin(index) for index in range(len(self._endpoints))]
        try:
            for admin in admins:
                admin.post(_PAUSE)
            self._transfer.send(model, admins)
            failures = self._each(self._finish)
        except Failed as error:
            failures = [str(error)] * len(admins)
        if any(failures):
            self._transfer.close()  # a channel with a member that is gone is of no use
            self._current = self._write(model)
            for index, why in enumerate(failures):
                if why:
                    self._replace(index, why, self._current)
            self._drop_unused()

    def _each(self, step: Any) -> list[str]:
        """Do a step on all servers side by side; per server why it failed, or nothing."""
        with ThreadPoolExecutor(len(self._endpoints)) as pool:
            return list(pool.map(step, range(len(self._endpoints))))

    def _reload(self, index: int) -> str:
        admin = self._admin(index)
        try:
            admin.post(_PAUSE)
            admin.load(str(self._current))
        except Failed as error:
            return str(error)
        return self._finish(index)

    def _finish(self, index: int) -> str:
        """After weights have come: make them count, lift the pause, and look whether they did."""
        admin = self._admin(index)
        try:
            admin.post("/update_weight_version", {"new_version": self._coming})
            admin.forget_prefixes()
            admin.post("/resume")
            return self._wrong(admin)
        except Failed as error:
            return str(error)

    def _replace(self, index: int, why: str, weights: Path) -> Endpoint:
        log.warning("rollout server %d is replaced: %s", index, why)
        self._endpoints[index] = self._servers.replace(index, weights, why)
        self._require(index)
        return self._endpoints[index]

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
        assert self._canary is not None
        difference = admin.difference(self._canary, self._coming)
        if difference <= self._tolerance:
            return ""
        return (
            f"its log-probabilities of a fixed prompt differ from the trainer's by up to "
            f"{difference:.2g}, more than {self._tolerance:g}"
        )

    def _admin(self, index: int) -> Admin:
        return Admin(self._endpoints[index], self._timeout_s)
