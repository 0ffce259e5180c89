"""Program of each rank of a training stage: ``python -P -m flows.ranks.rank``.

In: the order of its attempt and its agent's settings, both in the environment. Out: a trained
stage. Rank 0 has the attempt's IO, the judge and the report; the others train. The error that ends
a rank is sent to the worker before the process ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from flows.ranks.training import train
from flows.stages.work import StageWork, judged_as_planned
from infra.host.processes import collect_rarely
from infra.process.watchdog import die_with_parent
from infra.ranks.agent import ignore_stop_signals
from infra.ranks.bridge import RemoteIO
from infra.ranks.messages import ORDER, start_beats, tell_error
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import Interrupted
from refiner_core.contract.placement import section_of
from refiner_core.contract.records import StageSpec, from_json
from refiner_core.contract.types import Progress


def run_rank(act: Callable[[int], None]) -> NoReturn:
    """Run the work of one rank, and end this process."""
    die_with_parent()
    collect_rarely()
    ignore_stop_signals()
    rank = int(os.environ["RANK"])
    start_beats(rank)
    try:
        act(rank)
    except BaseException as error:
        tell_error(rank, error)
        # All ranks stop together on request, and none disturbs another that is still saving.
        code = 0 if isinstance(error, Interrupted) else 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Library threads that wait for a dead rank must not keep this process alive.
    os._exit(code)


def _train_as(rank: int) -> None:
    from infra.attempt.stage_io import set_up_logging
    from refiner_core.training.ranks import open_ranks

    order = json.loads(os.environ[ORDER])
    io = RemoteIO.from_environment() if rank == 0 else None
    work = _work(order, io)
    if io is not None:
        io.progress(Progress(0, 0, "loading"))
    stage = work.spec.kind
    section = section_of(work.config, stage)
    set_up_logging(work.config)
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(judged_as_planned(work.spec, work.config))
        with open_ranks(cuda=section.resources.gpus > 0) as ranks:
            report = train(work, stage, ranks)
    if io is not None:
        io.finish(report)


def _work(order: dict[str, Any], io: RemoteIO | None) -> StageWork:
    opened = Workspace.read_only if io is None else Workspace.open
    workspace = opened(order["workspace"])
    stage_id, attempt = order["stage_id"], int(order["attempt"])
    stage = workspace.layout.stage(stage_id)
    return StageWork(
        spec=from_json(StageSpec, workspace.read_control(stage.spec)),
        config=from_json(RecipeConfig, workspace.part(stage.attempt(attempt), "config")),
        inputs={role: Path(path) for role, path in order["inputs"].items()},
        input_stages=order["input_stages"],
        output_dir=Path(order["output_dir"]),
        io=io,  # type: ignore[arg-type]  # rank 0 alone has one
        stage_id=stage_id,
        workspace=workspace,
        attempt=attempt,
    )


if __name__ == "__main__":
    run_rank(_train_as)
