"""A rank without torch, for tests of launching, messages and ends.

``behaviour.json`` in the workspace: ``steps`` (each saved by rank 0), ``step_s``, and which rank
``fails``. Ranks other than 0 go on until rank 0 has ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from infra.process.watchdog import die_with_parent
from infra.ranks.agent import ignore_stop_signals
from infra.ranks.bridge import RemoteIO
from infra.ranks.messages import ORDER, tell_error
from refiner_core.contract.errors import ConfigurationError, Interrupted
from refiner_core.contract.types import Progress


def main() -> int:
    """Work as one rank."""
    die_with_parent()
    ignore_stop_signals()
    rank = int(os.environ["RANK"])
    root = Path(json.loads(os.environ[ORDER])["workspace"])
    told = json.loads((root / "behaviour.json").read_text())
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} is here", flush=True)
    (root / f"rank-{rank}.pid").write_text(str(os.getpid()))
    try:
        if rank:
            other(rank, root, told)
        else:
            first(root, told)
    except BaseException as error:
        tell_error(rank, error)
        return 0 if isinstance(error, Interrupted) else 1
    return 0


def first(root: Path, told: dict[str, Any]) -> None:
    """Steps with metrics and checkpoints."""
    io = RemoteIO.from_environment()
    assert "REFINER_RANKS_TOKEN" not in os.environ, "what a rank starts has no key"
    latest = io.latest_checkpoint()
    begun = 0 if latest is None else latest.step
    for step in range(begun + 1, int(told["steps"]) + 1):
        time.sleep(float(told.get("step_s", 0.05)))
        io.log_metrics(step, {"square": float(step**2)})
        io.progress(Progress(step, int(told["steps"]), "train"))
        with io.new_checkpoint(step) as folder:
            (folder / "state").write_text(str(step))
        if step < int(told["steps"]) and io.should_stop():
            (root / "rank-0.stopped").write_text(str(step))
            raise Interrupted(f"stopped after step {step}")
    io.finish({"steps": told["steps"], "begun": begun})
    (root / "rank-0.done").touch()


def other(rank: int, root: Path, told: dict[str, Any]) -> None:
    """Wait for rank 0, or fail once it has begun."""
    while not any((root / f"rank-0.{end}").exists() for end in ("done", "stopped")):
        if told.get("fails") == rank and (root / "rank-0.pid").exists():
            raise ConfigurationError("told to fail", expected="no less", fix="tell it otherwise")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
