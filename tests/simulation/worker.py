"""What a job runs: the real attempt, around steps that take virtual time.

In: a job of the simulated cluster. Out: the worker's exit code; metrics, checkpoints and a result
through the real :class:`~infra.attempt.attempt.AttemptRun`. The state of a stage is a chain of
hashes, one per step, so the result says whether each step was done exactly once and in order,
across all interruptions.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.attempt.attempt import AttemptRun
from infra.jobs.signals import AttemptClosed, attempt_to_run, job_of
from infra.store.workspace import Workspace
from refiner_core.contract.errors import Interrupted, JudgeOutage, NotFiniteError, RefinerError
from refiner_core.contract.types import Progress
from tests.simulation.disk import SimDisk, read_state
from tests.simulation.slurm import SimJob
from tests.simulation.world import Killed, World


@dataclass(frozen=True)
class Shape:
    """How a stage works: so many steps of so many seconds, a save each so many steps.

    ``reads``: it exports the checkpoint of that step of that stage, and does nothing else.
    """

    steps: int
    step_s: float
    save_every: int
    save_s: float
    reads: tuple[str, int] | None = None

    def final_state(self, stage_id: str) -> str:
        """What its result has to say."""
        return chain_after(*self.reads) if self.reads else chain_after(stage_id, self.steps)


def chain_after(stage_id: str, step: int) -> str:
    """The state of a stage after a step, if every step was done once."""
    state = stage_id
    for number in range(1, step + 1):
        state = _next(state, number)
    return state


def _next(state: str, step: int) -> str:
    return hashlib.sha256(f"{state} {step}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Worker:
    """Runs jobs."""

    world: World
    workspace: Workspace
    disk: SimDisk
    shapes: Mapping[str, Shape]

    def __call__(self, job: SimJob) -> int:
        """Run one job; its exit code."""
        stage_id, named = job.request.stage_id, job.request.attempt
        try:
            started = job_of(self.workspace, stage_id, named)
            number = attempt_to_run(self.workspace, stage_id, named, started)
            attempt = AttemptRun(self.workspace, stage_id, number, started, own_log=False)
            attempt.__enter__()
        except AttemptClosed:
            return 0  # somebody else goes on
        except RefinerError as known:
            self.world.tell(f"cannot begin: {known}")
            return known.exit_code
        except OSError as failed:  # a traceback, and Python's own exit code
            self.world.tell(f"cannot begin: {failed}")
            return 1
        error: BaseException | None = None
        try:
            attempt.finish(self._steps(attempt, job))
            return 0
        except Killed:
            raise
        except BaseException as caught:
            error = caught
            outcome = attempt.fail(caught)
            self.world.tell(f"attempt {number} ends: {outcome.failure} ({outcome.decision})")
            return outcome.exit_code
        finally:
            if self.world.current is not None and self.world.current.alive:
                attempt.__exit__(type(error) if error else None, error, None)

    def _steps(self, attempt: AttemptRun, job: SimJob) -> dict[str, Any]:
        shape, stage_id, io = self.shapes[attempt.stage_id], attempt.stage_id, attempt.io
        if shape.reads:
            return self._export(attempt, shape)
        latest = io.latest_checkpoint()
        done, state = 0, stage_id
        if latest is not None:
            done, state = latest.step, read_state(latest.path)
        self.world.tell(f"attempt {attempt.number} of {stage_id} goes on after step {done}")
        for step in range(done + 1, shape.steps + 1):
            self.world.sleep(shape.step_s)
            self._trouble(job, step)
            state = _next(state, step)
            io.log_metrics(step, {"step_squared": float(step**2)})
            io.progress(Progress(step, shape.steps, "steps"))
            asked = io.should_stop()
            if asked or step % shape.save_every == 0:
                with io.new_checkpoint(step) as folder:
                    self.disk.save(folder, state.encode(), shape.save_s)
                self.world.tell(f"attempt {attempt.number} of {stage_id} has saved step {step}")
            if asked:
                raise Interrupted("asked to end")
        attempt.output_dir.mkdir(parents=True, exist_ok=True)
        (attempt.output_dir / "out.txt").write_text(state)
        return {"state": state}

    def _export(self, attempt: AttemptRun, shape: Shape) -> dict[str, Any]:
        self.world.sleep(shape.step_s / 2)
        state = read_state(attempt.inputs["policy"])
        self.world.sleep(shape.step_s / 2)
        attempt.output_dir.mkdir(parents=True, exist_ok=True)
        (attempt.output_dir / "out.txt").write_text(state)
        return {"state": state}

    def _trouble(self, job: SimJob, step: int) -> None:
        """What the job was told to run into."""
        trouble, job.trouble = job.trouble, ""
        if trouble == "bug":
            raise RuntimeError(f"an error that no rule knows, at step {step}")
        if trouble == "gpu error":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if trouble == "judge outage":
            raise JudgeOutage("the judge does not answer")
        if trouble == "not finite":
            raise NotFiniteError(f"the loss of step {step} is nan")
        while trouble == "no progress":
            self.world.sleep(300.0)
