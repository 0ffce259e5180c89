"""The runs of a proof: as `refiner run` does them, each in a workspace of its own, and one of them
hit at chosen points.

In: a recipe with overrides, a folder, stages that are there already; points. Out: finished stages,
and the :class:`Interruption` values that came about, as they really were: step and phase are those
of the last sign of life before the hit. Both runs of a proof use one copy of the code, though the
checkout may be edited meanwhile. Workers are hit from outside (SIGKILL to the process group, or a
request to stop), by what they leave on the disk, as a scheduler or a failing node would.
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

from flows.proving.planning import OneStage, Plans, Point, interruption_line
from flows.running.calls import Pinned, make_recipe_plan, pin_code, record_run, work_on
from flows.running.console import Console
from flows.running.showing import Launch
from flows.stored import rollouts_by_step
from infra.foreign.exports import link
from infra.host.processes import ProcessId
from infra.jobs.dispatch import make_router
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.checkpoints import CheckpointStore
from infra.store.provenance import host, keep_scratch, new_scratch, versions, write_proof
from infra.store.traces import read_metrics, read_rollouts
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.errors import Interrupted, StageFailed, WorkspaceError
from refiner_core.contract.proofs import PROOF_VERSION, Comparison, Interruption, ResumeProof

Tell = Callable[[str], None]


class _Room(NamedTuple):
    """A workspace of a proof, and the code that its jobs run."""

    workspace: Workspace
    pinned: Pinned


def _beside(straight: _Room, name: str, stages: Iterable[str]) -> _Room:
    """A workspace with the same code, judgements, and these finished stages.

    Judgements are shared so that it is training that is compared: a model that judges need not
    say the same twice.
    """
    other = Workspace.open(straight.workspace.root.parent / name)
    for part in ("code", "judgements"):
        source, target = getattr(straight.workspace.layout, part), getattr(other.layout, part)
        if source.is_dir():
            link_tree(source, target)
    share_stages(straight.workspace, other, stages)
    return _Room(other, straight.pinned)


def _run_recipe_in(
    room: _Room, recipe: str, overrides: tuple[str, ...], *, name: str, tell: Tell
) -> None:
    """Carry a recipe out in a workspace of a proof, to its end.

    Raises
    ------
    Interrupted
        On request (Ctrl-C); nothing is proven.
    StageFailed
        A stage failed, or was ended and not taken up again; names its log.
    """
    workspace = room.workspace
    words = (*overrides, f"workspace={workspace.root}", "data_root=null")
    plan = make_recipe_plan(recipe, words)
    make_router(plan.config.dispatch, workspace).check(plan.stages)
    run = record_run(plan, workspace, recipe, words, room.pinned)
    workspace.write_run(run)
    console = _ProofConsole(name, tell)
    outcome = work_on(plan, workspace, run, Launch(False, True), console=console)
    undone = [v for v in outcome.views.values() if v.state not in ("done", "skipped")]
    if undone and console.stopping:
        raise Interrupted(
            f"Stopped while proving {plan.recipe}; nothing was recorded",
            fix="run the same command again; it begins anew",
        )
    for view in undone:
        error = StageFailed(
            f"The proof came to no end: {view.name} {view.state}"
            + (f" ({view.message.rstrip('.')})" if view.message else ""),
            expected="the shortened recipe to run",
            fix=f"look at {view.log or 'the message'}, mend it, and run the same command again",
        )
        error.exit_code = view.exit_code or StageFailed.exit_code
        raise error


class _ProofConsole(Console):
    """Says line by line how the stages of a proof go; knows whether somebody has pressed Ctrl-C."""

    stopping = False

    def __init__(self, name: str, tell: Tell) -> None:
        super().__init__(stream=io.StringIO())
        self._name, self._tell = name, tell

    def note(self, message: str) -> None:
        """Say something in between: that it is being stopped."""
        self.stopping = True
        super().note(message)

    def _print(self, message: str) -> None:
        self._tell(f"{self._name}: {message}")


# ---------------------------------------------------------------- what is shared


def share_stages(source: Workspace, target: Workspace, stages: Iterable[str]) -> None:
    """Finished stages of another workspace, by hard links; without their checkpoints."""
    for stage_id in stages:
        if source.read_result(stage_id) is None:
            continue
        ours, theirs = (w.layout.stage(stage_id) for w in (target, source))
        link_tree(theirs.data, ours.data, leave_out=("checkpoints", "result.json"))
        link_tree(theirs.control, ours.control, leave_out=("checkpoints", "result.json"))
        # Last, and of its own: what it names is there by now.
        atomic.write_bytes(ours.result, theirs.result.read_bytes())


def link_tree(source: Path, target: Path, leave_out: tuple[str, ...] = ()) -> None:
    """The same files elsewhere, as hard links where that can be, else as copies."""

    def put(one: str, other: str) -> None:
        if not Path(other).exists() and not link(Path(one), Path(other)):
            shutil.copyfile(one, other)

    def ignored(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if n in leave_out] if Path(folder) == source else []

    with no_space_guard(target, "sharing what is done already"):
        shutil.copytree(source, target, copy_function=put, ignore=ignored, dirs_exist_ok=True)


_LOOK_S = 0.002
#: A save in progress: step and attempt.
_SAVE = re.compile(re.escape(atomic.TEMPORARY) + r"step-(\d+)-a(\d+)")


class _Sight(NamedTuple):
    """Word of a worker on itself: the step that it is in (from 1), and the phase."""

    attempt: int
    step: int
    phase: str
    worker: ProcessId


class _Interrupter:
    """Waits for each point in turn and hits the worker there, once per attempt.

    A phase that is over before it is seen is made up for: the worker is hit as soon after it as can
    be. Ends when all points have come, when the stage is done, or with :meth:`leave`.
    """

    def __init__(
        self,
        workspace: Workspace,
        stage_id: str,
        points: Sequence[Point],
        on_hit: Callable[[Interruption], None],
    ) -> None:
        self._points, self._on_hit = points, on_hit
        self._kind = stage_id.partition("-")[0]
        self._paths = workspace.layout.stage(stage_id)
        self._left = threading.Event()
        self.made: list[Interruption] = []

    def leave(self) -> None:
        """Hit nothing any more."""
        self._left.set()

    def run(self) -> list[Interruption]:
        """All points; gives what came about."""
        waiting, after = list(self._points), 0
        while waiting and not self._left.wait(_LOOK_S) and not self._paths.result.exists():
            point, sight = waiting[0], self._look()
            if sight is None or sight.attempt <= after or sight.step < point.step:
                continue
            if sight.step == point.step and sight.phase != point.phase:
                continue
            time.sleep(point.delay_s)
            after = sight.attempt  # also where it was over just before
            if (found := self._strike(point, sight)) is not None:
                self.made.append(found)
                self._on_hit(found)
                del waiting[0]
        return self.made

    def _strike(self, point: Point, sight: _Sight) -> Interruption | None:
        if not sight.worker.alive:
            return None
        if point.how == "stop":
            sight.worker.terminate()
        else:
            sight.worker.kill_group()
            if not sight.worker.wait_gone(30.0):
                return None
        last = self._look() or sight  # its last word
        if last.attempt != sight.attempt or self._paths.result.exists():
            return None
        return Interruption(last.step, last.phase, point.how, sight.attempt)

    def _look(self) -> _Sight | None:
        """The save that the last attempt is at, or was at when it died; else what it says of
        itself: GRPO tells each of its phases at once, SFT has but one, and logs each step."""
        number = max(self._paths.attempt_numbers(), default=0)
        paths, there = self._paths.attempt(number), self._paths.checkpoints
        process = _read(paths.started).get("process")
        if not process:
            return None
        worker = ProcessId.parse(str(process))
        for path in there.iterdir() if there.is_dir() else ():
            match = _SAVE.fullmatch(path.name)
            if match and int(match.group(2)) == number:
                return _Sight(number, int(match.group(1)), "save", worker)
        if self._kind == "sft":
            lines = paths.metrics.read_bytes().split(b"\n")[:-1] if paths.metrics.exists() else ()
            step = int(json.loads(lines[-1])["step"]) if lines else None
            return None if step is None else _Sight(number, step + 1, "update", worker)
        progress = _read(paths.heartbeat).get("progress")
        if not progress:
            return None
        phase = "between steps" if progress["phase"] == "train" else str(progress["phase"])
        return _Sight(number, int(progress["done"]) + 1, phase, worker)


def as_they_were(
    workspace: Workspace, stage_id: str, made: Sequence[Interruption]
) -> list[Interruption]:
    """The interruptions of a finished stage, with the checkpoints that attempts went on from. A
    request to stop that came with the last step has stopped nothing, and is none."""
    record = workspace.read_record(stage_id)
    if record is None or record.result is None:
        return []
    steps = {a.number: a.resumed_from_step for a in record.attempts}
    return [
        replace(i, resumed_from_step=steps.get(i.attempt + 1))
        for i in made
        if i.attempt != record.result.attempt
    ]


def _read(path: Any) -> dict[str, Any]:
    """A small file that somebody else replaces; nothing if it is not there."""
    value = atomic.read_json(path)
    return value if isinstance(value, dict) else {}


# ---------------------------------------------------------------- the proof


class _Trained(NamedTuple):
    """A finished training, as far as it is compared: step and numbers line by line, rollouts by
    step, the exported weights, and the last complete checkpoint, which is that of the last step."""

    trace: list[tuple[int, dict[str, float | None]]]
    rollouts: dict[int, list[dict[str, Any]]]
    model: Path
    checkpoint: Path


def _read_trained(workspace: Workspace, stage_id: str) -> _Trained:
    """Files of the attempt that finished; they tell the whole story.

    Raises
    ------
    WorkspaceError
        The stage is not done, or its checkpoints are gone.
    """
    stage, result = workspace.layout.stage(stage_id), workspace.read_result(stage_id)
    checkpoint = CheckpointStore(stage.checkpoints, 0).latest()
    if result is None or checkpoint is None:
        raise WorkspaceError(
            f"{stage_id} of {workspace.root} is not done, or has no complete checkpoint",
            expected="a finished stage, with the checkpoint of its last step",
            fix="prove it again with `refiner prove-resume`; leave its workspace alone meanwhile",
        )
    paths = stage.attempt(result.attempt)
    return _Trained(
        trace=[(line.step, line.metrics) for line in read_metrics(paths.metrics)],
        rollouts={n: read_rollouts(p) for n, p in rollouts_by_step(paths.rollouts).items()},
        model=stage.data / result.output_dir / "model",
        checkpoint=checkpoint.path,
    )


def _compare(straight: _Trained, hit: _Trained, *, same_layout: bool) -> list[Comparison]:
    """All that can be compared of two trainings, in the order in which things come about.

    ``same_layout``: both ended on as many processes.
    """
    from refiner_core.training import equality  # brings torch

    moved = sum(numbers.get("learning_rate") or 0.0 for _, numbers in straight.trace)
    found = [equality.compare_traces(straight.trace, hit.trace)]
    if straight.rollouts:
        found.append(equality.compare_rollouts(straight.rollouts, hit.rollouts))
    found.append(equality.compare_weights(straight.model, hit.model, moved))
    found += equality.compare_checkpoints(
        straight.checkpoint, hit.checkpoint, moved, same_layout=same_layout
    )
    return [c for c in found if c.compared]


def prove_resume(
    plans: Plans, tell: Tell = lambda line: None, *, keep: bool = False
) -> list[ResumeProof]:
    """Prove that trainings resume exactly: run them straight and interrupted, and compare.

    Parameters
    ----------
    plans
        What :func:`flows.api.plan_resume_proofs` has made.
    tell
        Hears how far it is.
    keep
        Keep both runs (those that diverge always stay).

    Returns
    -------
    list of ResumeProof
        One per training: ``bitwise``, ``within tolerance`` or ``diverged``.

    Raises
    ------
    RefinerError
        A stage failed for a reason of its own.
    """
    workspace = Workspace.open(plans.config.workspace, plans.config.data_root)
    scratch = new_scratch(workspace, "-".join(s.short.id for s in plans.stages))
    evidence = False
    try:
        fresh = Workspace.open(scratch / "straight")
        straight = _Room(fresh, pin_code(fresh))
        share_stages(workspace, fresh, plans.given)
        overrides = plans.stages[-1].overrides
        _run_recipe_in(straight, plans.asked.recipe, overrides, name="straight", tell=tell)
        proofs = []
        for one in plans.stages:
            proof = _prove(plans, one, straight, tell)
            write_proof(workspace, proof)
            proofs.append(proof)
        evidence = any(p.verdict == "diverged" for p in proofs)
        return proofs
    except StageFailed:
        evidence = True
        raise
    finally:
        if keep or evidence:
            keep_scratch(scratch)
            tell(f"Both runs are kept in {scratch}")
        else:
            atomic.remove_tree(scratch)


def _prove(plans: Plans, one: OneStage, straight: _Room, tell: Tell) -> ResumeProof:
    asked, began = plans.asked, time.monotonic()
    done = [i for i in straight.workspace.stage_ids() if i != one.short.id]
    room = _beside(straight, f"interrupted-{one.kind}", done)
    made = _interrupted(plans, one, room, tell)
    tell(f"comparing {one.kind}")
    same = one.resumed_on is None
    undisturbed, hit = (_read_trained(r.workspace, one.short.id) for r in (straight, room))
    comparisons = _compare(undisturbed, hit, same_layout=same)
    return ResumeProof(
        version=PROOF_VERSION,
        recipe=plans.config.recipe,
        stage=one.full.name,
        stage_id=one.full.id,
        fingerprint=one.full.fingerprint,
        short_fingerprint=one.short.fingerprint,
        overrides=asked.overrides,
        changed=plans.changed,
        steps=undisturbed.trace[-1][0],
        seed=asked.seed,
        how=asked.how,
        wanted=asked.interruptions,
        interruptions=tuple(made),
        comparisons=tuple(comparisons),
        tolerance=one.tolerance,
        processes=None if same else one.processes,
        resume_processes=one.resumed_on,
        provenance={
            "host": host(),
            "versions": versions(),
            "code": straight.pinned.code,
            "commit": straight.pinned.provenance.get("commit"),
            "dirty": straight.pinned.provenance.get("dirty"),
        },
        made_at=now_text(),
        seconds=round(time.monotonic() - began, 1),
    )


def _interrupted(plans: Plans, one: OneStage, room: _Room, tell: Tell) -> list[Interruption]:
    """The stage once more, hit again and again.

    On another number of processes it is resumed by another call, as somebody would who has fewer
    GPUs today: the first one ends with the first interruption.
    """
    asked, name = plans.asked, f"interrupted {one.kind}"
    # GRPO is the last stage anyway.
    overrides = (*one.overrides, *(['stages=["data", "sft"]'] if one.kind == "sft" else []))

    def hit(found: Interruption) -> None:
        tell(f"{name}: {interruption_line(found)}")

    def run(points: slice, *more: str, expect_end: bool = False) -> list[Interruption]:
        interrupter = _Interrupter(room.workspace, one.short.id, one.points[points], hit)
        with ThreadPoolExecutor(1, "interrupter") as pool:
            hits = pool.submit(interrupter.run)
            try:
                words = (*overrides, *more)
                _run_recipe_in(room, asked.recipe, words, name=name, tell=tell)
            except StageFailed:
                if not (expect_end and interrupter.made):
                    raise
            finally:
                interrupter.leave()
        return hits.result()

    if one.resumed_on is None:
        made = run(slice(None))
    else:
        made = run(slice(1), "dispatch.retries.killed=0", expect_end=True)
        resumed = f"{one.kind}.nproc_per_node={one.resumed_on}"
        made += run(slice(1, None), resumed)
    made = as_they_were(room.workspace, one.short.id, made)
    if not made:
        raise StageFailed(
            f"{one.kind} was over before it could be interrupted",
            expected=f"a training that takes longer than {asked.steps} of these steps do",
            fix="use more --steps",
        )
    return made
