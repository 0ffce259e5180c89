"""Runs of a proof: as in `refiner run`, each in its own workspace, one of them interrupted.

In: a :class:`~flows.proving.proof_plan.ProofPlans`. Out: a proof each, with the interruptions as
they happened: step and phase are those of the last heartbeat before the hit. Both runs of a proof
use one copy of the code, as the checkout may be edited meanwhile. Workers are hit from outside
(SIGKILL to the process group, or a request to stop), by their files on disk, as by a scheduler or a
failing node.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flows.proving.proof_plan import ProofPlans, ProofStage, interruption_line
from flows.running.calls import CodeSnapshot, make_recipe_plan, pin_code, record_run, work_on
from flows.running.console import Console
from flows.running.foreground import LaunchOptions
from flows.stored import rollouts_by_step
from infra.host.files import link
from infra.host.processes import ProcessId
from infra.jobs.dispatch import make_router
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.checkpoints import CheckpointStore
from infra.store.layout import StagePaths
from infra.store.provenance import host, keep_scratch, new_scratch, versions, write_proof
from infra.store.traces import read_metrics, read_rollouts
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.errors import Interrupted, StageFailed
from refiner_core.contract.proofs import PROOF_VERSION, Interruption, ProofComparison, ResumeProof

Tell = Callable[[str], None]


def prove_resume(
    plans: ProofPlans, tell: Tell = lambda line: None, *, keep: bool = False
) -> list[ResumeProof]:
    """Prove that trainings resume exactly: run them straight and interrupted, and compare.

    Parameters
    ----------
    plans
        From :func:`flows.api.plan_resume_proofs`.
    tell
        Receives progress messages.
    keep
        Keep both runs (diverged ones always stay).

    Returns
    -------
    list of ResumeProof
        One per training: ``bitwise``, ``within tolerance`` or ``diverged``.

    Raises
    ------
    RefinerError
        A stage failed for another reason.
    """
    workspace = Workspace.open(plans.config.workspace, plans.config.data_root)
    scratch = new_scratch(workspace, "-".join(s.short.id for s in plans.stages))
    try:
        straight = Workspace.open(scratch / "straight")
        pinned = pin_code(straight)
        _share_stages(workspace, straight, plans.given)
        _run(straight, pinned, plans.recipe, plans.words, "straight", tell)
        proofs = []
        for one in plans.stages:
            proof = _prove(plans, one, straight, pinned, tell)
            write_proof(workspace, proof)
            keep = keep or proof.verdict == "diverged"
            proofs.append(proof)
        return proofs
    except StageFailed:
        keep = True
        raise
    finally:
        if keep:
            keep_scratch(scratch)
            tell(f"Both runs are kept in {scratch}")
        else:
            atomic.remove_tree(scratch)


def _prove(
    plans: ProofPlans, one: ProofStage, straight: Workspace, pinned: CodeSnapshot, tell: Tell
) -> ResumeProof:
    began, name = time.monotonic(), f"interrupted {one.kind}"
    other = Workspace.open(straight.root.parent / name.replace(" ", "-"))
    # Judgements are shared, so that only training is compared: a judge model may answer the same
    # question differently.
    for part in ("code", "judgements"):
        source, target = getattr(straight.layout, part), getattr(other.layout, part)
        if source.is_dir():
            _link_tree(source, target)
    _share_stages(straight, other, [i for i in straight.stage_ids() if i != one.short.id])

    def hit(found: Interruption) -> None:
        tell(f"{name}: {interruption_line(found)}")

    over = threading.Event()
    with ThreadPoolExecutor(1, "interrupter") as pool:
        hits = pool.submit(_interrupt, other.layout.stage(one.short.id), one, hit, over)
        try:
            # GRPO is the last stage.
            words = (*plans.words, *(['stages=["data", "sft"]'] if one.kind == "sft" else []))
            _run(other, pinned, plans.recipe, words, name, tell)
        finally:
            over.set()
    made = as_they_were(other, one.short.id, hits.result())
    if not made:
        raise StageFailed(
            f"{one.kind} ended before it could be interrupted",
            expected=f"a training longer than {plans.steps} of these steps",
            fix="use more --steps",
        )
    tell(f"comparing {one.kind}")
    sides = [_read_trained(room, one.short.id) for room in (straight, other)]
    return ResumeProof(
        version=PROOF_VERSION,
        recipe=plans.config.recipe,
        stage=one.full.name,
        stage_id=one.full.id,
        fingerprint=one.full.fingerprint,
        short_fingerprint=one.short.fingerprint,
        overrides=plans.overrides,
        changed=plans.changed,
        steps=sides[0].trace[-1][0],
        seed=plans.seed,
        how="both",
        wanted=plans.interruptions,
        interruptions=tuple(made),
        comparisons=tuple(_compare(*sides)),
        tolerance=one.tolerance,
        provenance={
            **{"host": host(), "versions": versions(), "code": pinned.code},
            **{name: pinned.provenance.get(name) for name in ("commit", "dirty")},
        },
        made_at=now_text(),
        seconds=round(time.monotonic() - began, 1),
    )


def _run(
    workspace: Workspace,
    pinned: CodeSnapshot,
    recipe: str,
    overrides: Sequence[str],
    name: str,
    tell: Tell,
) -> None:
    """Carry out a recipe in a workspace of a proof.

    Raises
    ------
    Interrupted
        Ctrl-C; nothing is proven.
    StageFailed
        A stage failed, or was ended and not resumed; names its log.
    """
    words = (*overrides, f"workspace={workspace.root}", "data_root=null")
    plan = make_recipe_plan(recipe, words)
    make_router(plan.config.dispatch, workspace).check(plan.stages)
    run = record_run(plan, workspace, recipe, words, pinned)
    workspace.write_run(run)
    console = _ProofConsole(name, tell)
    outcome = work_on(plan, workspace, run, LaunchOptions(False, True), console=console)
    for view in (v for v in outcome.views.values() if v.state not in ("done", "skipped")):
        if console.stopping:
            raise Interrupted(
                f"Stopped while proving {plan.recipe}; nothing was recorded",
                fix="run the same command again; it starts from the beginning",
            )
        error = StageFailed(
            f"The proof did not finish: {view.name} {view.state} ({view.message.rstrip('.')})",
            expected="the shortened recipe to run",
            fix=f"look at {view.log or 'the message'}, fix it, and run the same command again",
        )
        error.exit_code = view.exit_code or StageFailed.exit_code
        raise error


class _ProofConsole(Console):
    """Prints the progress of a proof's stages line by line; records whether Ctrl-C was pressed."""

    stopping = False

    def __init__(self, name: str, tell: Tell) -> None:
        super().__init__(stream=io.StringIO())
        self._name, self._tell = name, tell

    def note(self, message: str) -> None:
        """Print a message, such as that the run is being stopped."""
        self.stopping = True
        super().note(message)

    def _print(self, message: str) -> None:
        self._tell(f"{self._name}: {message}")


def _share_stages(source: Workspace, target: Workspace, stages: Iterable[str]) -> None:
    """Hard links to finished stages of another workspace, without their checkpoints."""
    for stage_id in stages:
        if source.read_result(stage_id) is not None:
            ours, theirs = (w.layout.stage(stage_id) for w in (target, source))
            _link_tree(theirs.data, ours.data)
            _link_tree(theirs.control, ours.control)


def _link_tree(source: Path, target: Path) -> None:
    """Link or copy a tree of files."""

    def put(one: str, other: str) -> None:
        if not Path(other).exists() and not link(Path(one), Path(other)):
            shutil.copyfile(one, other)

    leave_out = shutil.ignore_patterns("checkpoints")
    with no_space_guard(target, "sharing finished stages"):
        shutil.copytree(source, target, copy_function=put, ignore=leave_out, dirs_exist_ok=True)


# ---------------------------------------------------------------- interruptions

_LOOK_S = 0.002
#: A save in progress: step and attempt.
_SAVE = re.compile(re.escape(atomic.TEMPORARY) + r"step-(\d+)-a(\d+)")


class _WorkerState(NamedTuple):
    """State reported by a worker: the step that it is in (from 1), and the phase."""

    attempt: int
    step: int
    phase: str
    worker: ProcessId


def _interrupt(
    paths: StagePaths, one: ProofStage, hit: Callable[[Interruption], None], over: threading.Event
) -> list[Interruption]:
    """Wait for each point in turn and hit the worker there, once per attempt; yields the hits. A
    phase that ends unseen is replaced by the next possible moment."""
    waiting, made, after = list(one.points), list[Interruption](), 0
    while waiting and not over.wait(_LOOK_S) and not paths.result.exists():
        point, status = waiting[0], _look(paths, one.kind)
        if status is None or status.attempt <= after or status.step < point.step:
            continue
        if status.step == point.step and status.phase != point.phase:
            continue
        time.sleep(point.delay_s)
        after = status.attempt  # also if it had just ended
        if not status.worker.alive:
            continue
        if point.how == "stop":
            status.worker.terminate()
        else:
            status.worker.kill_group()
            if not status.worker.wait_ended(30.0):
                continue
        last = _look(paths, one.kind) or status  # its last report
        if last.attempt == status.attempt and not paths.result.exists():
            made.append(Interruption(last.step, last.phase, point.how, status.attempt))
            hit(made[-1])
            del waiting[0]
    return made


def _look(paths: StagePaths, kind: str) -> _WorkerState | None:
    """The save that the last attempt is in, or was in when it died; else its heartbeat: GRPO
    reports each of its phases at once, SFT has only one, and logs each step."""
    number = max(paths.attempt_numbers(), default=0)
    attempt, there = paths.attempt(number), paths.checkpoints
    process = _read(attempt.started).get("process")
    if not process:
        return None
    worker = ProcessId.parse(str(process))
    for path in there.iterdir() if there.is_dir() else ():
        match = _SAVE.fullmatch(path.name)
        if match and int(match.group(2)) == number:
            return _WorkerState(number, int(match.group(1)), "save", worker)
    if kind == "sft":
        lines = attempt.metrics.read_bytes().split(b"\n")[:-1] if attempt.metrics.exists() else ()
        step = int(json.loads(lines[-1])["step"]) if lines else None
        return None if step is None else _WorkerState(number, step + 1, "update", worker)
    progress = _read(attempt.heartbeat).get("progress")
    if not progress:
        return None
    phase = "between steps" if progress["phase"] == "train" else str(progress["phase"])
    return _WorkerState(number, int(progress["done"]) + 1, phase, worker)


def _read(path: Any) -> dict[str, Any]:
    """Content of a small file that another process replaces; empty if it is missing."""
    value = atomic.read_json(path)
    return value if isinstance(value, dict) else {}


def as_they_were(
    workspace: Workspace, stage_id: str, made: Sequence[Interruption]
) -> list[Interruption]:
    """Interruptions of a finished stage, with the checkpoints from which attempts resumed. A
    request to stop during the last step had no effect, and is left out."""
    record = workspace.read_record(stage_id)
    assert record is not None, "a stage that has run has a record"
    assert record.result is not None, "a finished run has results"
    steps = {a.number: a.resumed_from_step for a in record.attempts}
    stopped = (i for i in made if i.attempt != record.result.attempt)
    return [replace(i, resumed_from_step=steps.get(i.attempt + 1)) for i in stopped]


# ---------------------------------------------------------------- comparison


class _TrainingResult(NamedTuple):
    """A finished training, for the comparison: step and metrics line by line, rollouts by step, the
    exported weights, and the last complete checkpoint, which is that of the last step."""

    trace: list[tuple[int, dict[str, float | None]]]
    rollouts: dict[int, list[dict[str, Any]]]
    model: Path
    checkpoint: Path


def _read_trained(workspace: Workspace, stage_id: str) -> _TrainingResult:
    """Files of the attempt that finished; they have the complete history."""
    stage, result = workspace.layout.stage(stage_id), workspace.read_result(stage_id)
    checkpoint = CheckpointStore(stage.checkpoints, 0).latest()
    assert result is not None, "a finished run has results"
    assert checkpoint is not None, "a training ends with a checkpoint"
    paths = stage.attempt(result.attempt)
    return _TrainingResult(
        trace=[(line.step, line.metrics) for line in read_metrics(paths.metrics)],
        rollouts={n: read_rollouts(p) for n, p in rollouts_by_step(paths.rollouts).items()},
        model=stage.data / result.output_dir / "model",
        checkpoint=checkpoint.path,
    )


def _compare(straight: _TrainingResult, hit: _TrainingResult) -> list[ProofComparison]:
    """All comparisons of two trainings, in the order of the work."""
    from refiner_core.training import equality  # imports torch

    moved = sum(numbers.get("learning_rate") or 0.0 for _, numbers in straight.trace)
    found = [
        equality.compare_traces(straight.trace, hit.trace),
        equality.compare_rollouts(straight.rollouts, hit.rollouts),
        equality.compare_weights(straight.model, hit.model, moved),
        *equality.compare_checkpoints(straight.checkpoint, hit.checkpoint, moved),
    ]
    return [c for c in found if c.compared]
