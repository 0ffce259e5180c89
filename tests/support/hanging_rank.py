"""A rank that trains a little on gloo, and has one planned fault: ``hanging_rank.py`` as a module.

``behaviour.json`` in the workspace: ``steps``, ``step_s``, and the ``fault``: its ``rank``,
``step``, ``phase`` and ``kind``. The ranks, their messages and the way to the attempt are the real
ones. ``fault.json`` gets the time of the fault.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from flows.ranks.rank import run_rank
from infra.ranks.bridge import RemoteIO
from infra.ranks.messages import ORDER
from refiner_core.contract.errors import Interrupted
from refiner_core.contract.types import Progress
from refiner_core.training.engines.plain import sum_over_ranks
from refiner_core.training.pulse import PULSE
from refiner_core.training.ranks import Ranks, RanksIO, open_ranks

PHASES = ("generate", "judge", "update", "validate", "save")


class _Rank:
    def __init__(self, ranks: Ranks, root: Path) -> None:
        self.ranks, self.root = ranks, root
        self.told: dict[str, Any] = json.loads((root / "behaviour.json").read_text())
        self.fault: dict[str, Any] = self.told.get("fault") or {}
        remote = RemoteIO.from_environment() if ranks.rank == 0 else None
        self.remote, self.io = remote, RanksIO(remote, ranks)
        self.step = 0

    def train(self) -> None:
        self.io.progress(Progress(0, 0, "loading"))
        self.work("loading")
        for step in range(1, int(self.told["steps"]) + 1):
            self.step = step
            for phase in PHASES:
                self.io.progress(Progress(self.step - 1, int(self.told["steps"]), phase))
                getattr(self, phase)()
            self.io.log_metrics(self.step, {"square": float(self.step**2)})
        if not self.fault:  # the template's attempt leaves its stage open
            raise Interrupted("the healthy attempt is over")
        if self.remote is not None:
            self.remote.finish({"steps": self.step})

    def generate(self) -> None:
        self.work("generate")
        if not self.skips("generate"):
            self.ranks.gather([self.step] * 100)
        self.ranks.broadcast(self.step)

    def judge(self) -> None:
        self.work("judge")
        if not self.skips("judge"):
            self.ranks.broadcast({"rewards": [0.5] * 50})
        self.ranks.all_or_none(None)

    def update(self) -> None:
        weight = torch.nn.Parameter(torch.ones(64))
        self.work("update")
        weight.sum().backward()
        if not self.skips("update"):
            sum_over_ranks([weight], self.ranks)
        self.ranks.add([1.0, 2.0])

    def validate(self) -> None:
        self.work("validate")
        if not self.skips("validate"):
            self.ranks.add([0.5])
        self.ranks.broadcast("loss")

    def save(self) -> None:
        with self.io.new_checkpoint(self.step) as folder:
            self.work("save")
            if not self.skips("save"):
                self.ranks.gather(torch.ones(10).tolist())
            if self.ranks.rank == 0:
                (folder / "state").write_text(str(self.step))

    # ------------------------------------------------------------ faults

    def work(self, phase: str) -> None:
        for _ in range(3):
            time.sleep(float(self.told["step_s"]) / 15)
            PULSE.moved += 1
        if self.is_due(phase):
            self.note()
            getattr(self, f"_{self.fault['kind']}")()

    def is_due(self, phase: str) -> bool:
        step = 0 if phase == "loading" else self.fault.get("step")
        wanted = (self.fault.get("rank"), step, self.fault.get("phase"))
        return (self.ranks.rank, self.step, phase) == wanted

    def skips(self, phase: str) -> bool:
        return self.is_due(phase) and self.fault["kind"] == "skip"

    def note(self) -> None:
        (self.root / "fault.json").write_text(json.dumps({"at": time.time()}))

    def _skip(self) -> None:
        """Nothing here: the collective is left out."""

    def _sleep(self) -> None:
        time.sleep(100_000)

    def _loop(self) -> None:
        while True:
            sum(range(1000))

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _exit(self) -> None:
        os._exit(7)

    def _memory(self) -> None:
        bytearray(1 << 60)

    def _disk(self) -> None:
        raise OSError(errno.EIO, "Input/output error", str(self.root / "state"))

    def _full(self) -> None:
        with Path("/dev/full").open("w") as file:
            file.write("state")


def _act(_rank: int) -> None:
    with open_ranks(cuda=False) as ranks:
        _Rank(ranks, Path(json.loads(os.environ[ORDER])["workspace"])).train()


if __name__ == "__main__":
    run_rank(_act)
