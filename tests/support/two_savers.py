"""One of two ranks that train and save beside it: ``two_savers.py FOLDER FAULT…``, under torchrun's
environment; one training after the other, a folder for each. Rank 0 has a real store, and prints a
line per training. Training uses the ranks' own connection meanwhile.

FAULT: ``none``, ``slow`` (rank 1 writes until four further steps are done), ``full`` (rank 1 meets
a full disk once), ``error`` (rank 1 cannot write at all).
"""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.attempt.stage_io import AttemptIO
from infra.store.checkpoints import CheckpointStore
from infra.store.layout import StagePaths
from refiner_core.training.ranks import RanksIO, TorchRanks
from refiner_core.training.steps.checkpoint_manager import CheckpointManager

STEPS, SAVE_EVERY = 9, 4


class Share:
    """This rank's part of a state."""

    def __init__(self, engine: OneShare, value: str) -> None:
        self.engine, self.value = engine, value

    def write(self, folder: Path) -> None:
        if self.engine.fault == "slow" and self.engine.ranks.rank == 1:
            seen = self.engine.step
            while self.engine.step < min(STEPS - 1, seen + 3):
                time.sleep(0.01)
        if self.engine.fault == "full" and self.engine.ranks.rank == 1:
            self.engine.fault = "none"
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.engine.fault == "error" and self.engine.ranks.rank == 1:
            raise RuntimeError("the second rank cannot write")
        (folder / f"state-{self.engine.ranks.rank}").write_text(self.value)


class OneShare:
    """An engine whose state is the number of its step."""

    def __init__(self, ranks: TorchRanks, fault: str) -> None:
        self.ranks, self.fault, self.step = ranks, fault, 0

    def snapshot(self, progress: Mapping[str, Any]) -> Share:
        return Share(self, json.dumps(progress))


def main(root: Path, faults: list[str]) -> None:
    """Train nine steps per fault."""
    with TorchRanks(cuda=False) as ranks:
        for fault in faults:
            told = train(root / fault, fault, ranks)
            if told is not None:
                print(json.dumps(told), flush=True)


def train(folder: Path, fault: str, ranks: TorchRanks) -> dict[str, Any] | None:
    """What there is in the end, by rank 0."""
    engine, waited = OneShare(ranks, fault), list[int]()
    paths = StagePaths(folder / "control", folder / "data")
    io = AttemptIO(
        *(paths, 1, CheckpointStore(paths.checkpoints, 1, keep=9)),
        wait_for_space=lambda: waited.append(1) is None,
    )
    edge = CheckpointManager(
        *(RanksIO(io if ranks.rank == 0 else None, ranks), engine),
        *("sft", STEPS, SAVE_EVERY),
        async_save=True,
    )
    seen, error = [], ""
    try:
        with edge:
            for step in range(1, STEPS + 1):
                assert ranks.add([1.0, step]) == [2.0, 2.0 * step]
                assert ranks.broadcast(f"step {step}") == f"step {step}"
                engine.step = step
                edge.after(step, {"step": step}, {})
                seen.append((step, edge.saved_step))
    except RuntimeError as raised:
        error = str(raised)
    both = ranks.gather((seen, error))
    if both is None:
        return None
    assert both[0] == both[1], "both learn of everything at the same step"
    complete = io.checkpoints.complete()
    kept = {p.name: p.read_text() for c in complete[:1] for p in sorted(c.path.glob("state-*"))}
    told = {"steps": [c.step for c in complete], "seen": seen, "error": error}
    return told | {"waited": len(waited), "kept": kept}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
