"""Command of a job: ``python -P -m flows.worker --workspace DIR STAGE_ID ATTEMPT``.

In: an attempt that an orchestrator has claimed. Out: its result or its outcome, in the workspace. A
requeued job gets the same command line; :mod:`infra.jobs.signals` finds the attempt that it means
by then. On further nodes of a job it only starts ranks (:mod:`infra.ranks.launch`). The exit code
is one of :data:`refiner_core.contract.errors.EXIT_CODES`, and is all that the starter of the job
needs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from infra.attempt.attempt import AttemptRun
from infra.attempt.stage_io import set_up_logging
from infra.disk.usage import use_node_caches
from infra.host.processes import collect_rarely
from infra.jobs.signals import AttemptClosed, attempt_to_run, job_of
from infra.store.provenance import refuse_other_code
from infra.store.workspace import Workspace
from refiner_core.contract.errors import NoSpaceError, RefinerError
from refiner_core.contract.services import is_service

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flows.stages.work import StageWork


def main(argv: Sequence[str] | None = None) -> int:
    """Run one attempt; returns the exit code."""
    parser = argparse.ArgumentParser(prog="flows.worker", description=__doc__)
    parser.add_argument("--workspace", required=True)
    parser.add_argument("stage_id")
    parser.add_argument("attempt", type=int)
    args = parser.parse_args(argv)
    use_node_caches()
    collect_rarely()
    try:
        workspace = Workspace.open(args.workspace)
        job = job_of(workspace, args.stage_id, args.attempt)
        if job is not None:
            from infra.ranks.launch import node_number, wait_for_work

            if node := node_number():
                return wait_for_work(workspace, args.stage_id, job, node)
        number = attempt_to_run(workspace, args.stage_id, args.attempt, job)
        attempt = AttemptRun(workspace, args.stage_id, number, job)
        set_up_logging(attempt.config)
        with attempt:
            try:
                report = _run(attempt)
                if is_service(args.stage_id):
                    attempt.rest(str(report["ended"]))
                else:
                    attempt.finish(report)
            except BaseException as error:
                return attempt.fail(error).exit_code
    except AttemptClosed as closed:
        print(closed, file=sys.stderr)
        return 0  # another job continues, so this one is done
    except RefinerError as error:
        if isinstance(error, NoSpaceError):
            _report_no_space(Workspace.read_only(args.workspace), args.stage_id)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _report_no_space(workspace: Workspace, stage_id: str) -> None:
    """Print that the disk is full, when nothing can be recorded."""
    if numbers := workspace.layout.stage(stage_id).attempt_numbers():
        with contextlib.suppress(OSError):  # then only the exit code remains
            workspace.note_space(stage_id, numbers[-1], there=False)


def _run(attempt: AttemptRun) -> dict[str, object]:
    from flows.stages.work import judged_as_planned, run_stage

    refuse_other_code(attempt.workspace)
    attempt.check_inputs()
    spec, config = attempt.spec, attempt.config
    with judged_as_planned(spec, config):
        return run_stage(work_of(attempt))


def work_of(attempt: AttemptRun) -> StageWork:
    """Everything that the attempt's stage may use."""
    from flows.stages.work import StageWork

    names = ("spec", "config", "inputs", "input_stages", "output_dir", "io", "stage_id")
    given = {name: getattr(attempt, name) for name in (*names, "workspace")}
    return StageWork(**given, attempt=attempt.number)


if __name__ == "__main__":
    sys.exit(main())
