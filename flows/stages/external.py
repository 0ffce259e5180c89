"""The `command` stage: runs and supervises an external trainer, and exports its model.

In: the work of a ``command`` stage. Out: ``output/model``, and a report with the steps, the command
and its last printed metrics. Its own checkpoints stay in ``work/`` of the stage's folder, which all
attempts share.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from flows.stages.fetch import local_model
from flows.stages.work import StageWork
from infra.attempt.stage_io import AttemptIO
from infra.disk.manager import DiskManager
from infra.external.checkpoints import work_folder
from infra.external.exports import find_export, make_model
from infra.external.process import TrainerJob, fill, run_trainer
from infra.jobs.dispatcher import AttemptRef
from refiner_core.contract.config import uses
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.types import Progress

log = logging.getLogger(__name__)


def run_external(work: StageWork) -> dict[str, Any]:
    """Run the trainer from its newest checkpoint to its end, and export its model.

    Raises
    ------
    RefinerError
        The reason of its end; see :func:`infra.external.process.run_trainer`.
    """
    command = work.config.command
    if command.adopted:
        raise WorkspaceError(
            f"The weights of {work.stage_id} were adopted, and are no longer in this workspace",
            expected="the stage as written by `refiner adopt`",
            fix=f"adopt them again: `refiner adopt DIR workspace={work.workspace.root}`",
        )
    job = _job(work)
    found, told = run_trainer(job, _io(work))
    source = find_export(job.output, command.exports, found)
    # Sizes and shards have been checked; check the fence once more before the export.
    job.check_fence()
    made, text = work.output_dir / "model", command.companions
    companions = Path(fill(text, job.values())).expanduser() if text else None
    missing = make_model(source, made, companions, within=job.output)
    newest = max((c.step for c in found if not c.damage), default=0)
    steps = newest if command.exports == "auto" else max(newest, told.done)
    remark = _remark(told, steps)
    if remark:
        log.warning("%s", remark)
    return {
        "steps": steps,
        "steps_planned": max(told.total, steps),
        "remark": remark,
        "command": command.run,
        # Empty if only the trainer knows them.
        "base_model": work.config.model.name_or_path if uses(command, "model") else "",
        "version": command.version,
        "export": source.relative_to(job.output).as_posix(),
        "missing": missing,
        "resumed_from": _io(work).resumed_step,
        "final": {k: v for k, v in told.values.items() if k not in ("step", "total")},
    }


def _remark(told: Progress, steps: int) -> str:
    """Remark on weights from fewer steps than the trainer had announced; empty otherwise."""
    if told.done < told.total:
        end = f"the trainer ended by itself at step {told.done} of {told.total}"
    elif steps < told.done:
        end = f"the trainer reached step {told.done}"
    else:
        return ""
    more = "" if steps == told.done else f", and its newest complete checkpoint is step {steps}"
    return f"{end}{more}: that is its result"


def _job(work: StageWork) -> TrainerJob:
    config, io = work.config, _io(work)
    disk_manager = DiskManager(work.workspace, config.disk, stop_requested=io.should_stop)
    ref = AttemptRef(work.stage_id, work.attempt)
    return TrainerJob(
        command=config.command,
        output=work_folder(work.workspace.layout.stage(work.stage_id)),
        workdir=Path(config.command.workdir or Path.cwd()).expanduser().absolute(),
        seed=config.seed,
        stage_id=work.stage_id,
        attempt=work.attempt,
        data=work.inputs.get("data"),
        model=_model_folder(work) if uses(config.command, "model") else None,
        check_fence=partial(work.check_fence, "trainer ends"),
        shortage=lambda need: disk_manager.shortage(need, ref, fresh=True),
        free_space=lambda need: disk_manager.free_space(need, ref),
        grace_s=config.dispatch.grace_s,
        watch_s=config.disk.watch_s,
    )


def _io(work: StageWork) -> AttemptIO:
    assert isinstance(work.io, AttemptIO), "an attempt's own"
    return work.io


def _model_folder(work: StageWork) -> str:
    if "policy" in work.inputs:
        return work.model_ref
    return local_model(work.config.model)
