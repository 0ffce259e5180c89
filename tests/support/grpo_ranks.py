"""GRPO on the tiny model in several processes that train together.

python -m tests.support.grpo_ranks ROOT CASES, in the environment of torchrun: CASES is JSON, a list
of objects with ``name``, ``grpo`` (its section) and optionally ``every`` (of a monitor),
``stop_at``, ``fault`` (``judge``, ``sampler``, ``rewards``; in the second step) and ``again`` (run
it once more). Every rank writes what it met to ROOT/NAME/rank-R.json; rank 0's IO is a folder
there.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import DataError, JudgeOutage, RefinerError
from refiner_core.contract.types import RewardResult
from refiner_core.training import monitor
from refiner_core.training.monitor import Gold
from refiner_core.training.ranks import TALK, Ranks, open_ranks
from tests.support.stage_io import FolderStageIO
from tests.support.tiny_training import (
    NoJudge,
    count_low_words,
    low_or_high,
    recipe,
    train_rewarded,
    watched,
)

Case = dict[str, Any]


def launch(root: Path, cases: Sequence[Case], *, ranks: int, timeout_s: float) -> None:
    """Run the cases in ``ranks`` processes of their own; every rank must end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    around = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        TALK: "5a" * 32,
    }
    command = [sys.executable, "-m", "tests.support.grpo_ranks", str(root), json.dumps(cases)]
    started = []
    try:
        for rank in range(ranks):
            env = {**around, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (root / f"rank-{rank}.log").open("wb") as said:
                started.append(subprocess.Popen(command, env=env, stdout=said, stderr=said))
        codes = [process.wait(timeout_s) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    logs = [(root / f"rank-{rank}.log").read_text(errors="replace") for rank in range(ranks)]
    assert codes == [0] * ranks, "\n".join(log[-3000:] for log in logs)


def train(root: Path, case: Case, ranks: Ranks) -> dict[str, Any]:
    """One case in this process; its report."""
    first, config = ranks.rank == 0, recipe(grpo=case.get("grpo", {}))
    golds: list[Gold] = []
    if every := case.get("every"):
        config, monitor._shares = watched(config, every=every), low_or_high
        golds = [Gold("gold", config, NoJudge())] if first else []
    io = None
    if first:
        io = FolderStageIO(root / case["name"])
        io.stop_at = case.get("stop_at")
    return train_rewarded(
        _rewards(case.get("fault", "")),
        config,
        data_dir=root / "data",
        model_ref=str(root / "model"),
        output_dir=root / case["name"] / "out",
        io=io,
        judge=NoJudge() if first else None,
        ranks=ranks,
        golds=golds,
    )


def _rewards(fault: str) -> Any:
    calls: list[int] = []

    def rewards(*args: Any) -> list[RewardResult]:
        calls.append(1)
        if len(calls) == 2 and fault == "judge":
            raise JudgeOutage("nobody is there")
        if len(calls) == 2 and fault == "rewards":
            raise DataError("a row's rubrics do not fit")
        return count_low_words(*args)

    return rewards


def _break_sampler(ranks: Ranks) -> None:
    """The last rank's sampler dies in its second call."""
    from refiner_core.generation.transformers_backend import TransformersGenerator

    generate, calls = TransformersGenerator.generate, []

    def broken(self: Any, *args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and ranks.rank == ranks.world - 1:
            raise RuntimeError("this rank's node is ill")
        return generate(self, *args, **named)

    TransformersGenerator.generate = broken


def _live(root: Path, cases: Sequence[Case]) -> None:
    with open_ranks(cuda=False) as ranks:
        for case in cases:
            if case.get("fault") == "sampler":
                _break_sampler(ranks)
            met: dict[str, Any] = {}
            try:
                met["report"] = train(root, case, ranks)
            except (RefinerError, RuntimeError) as error:
                met["error"] = f"{type(error).__name__}: {error}"
            if case.get("again"):
                met["report"] = train(root, {**case, "stop_at": None, "fault": ""}, ranks)
            ranks.broadcast(0)  # the folder is there
            path = root / case["name"] / f"rank-{ranks.rank}.json"
            path.write_text(json.dumps(met))


if __name__ == "__main__":
    _live(Path(sys.argv[1]), json.loads(sys.argv[2]))
