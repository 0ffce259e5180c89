"""Proof that training resumes exactly: its plan, its runs, and their output.

In: a recipe with overrides, and the options of the command. Out: a :class:`ProofPlans` (stages, how
each is shortened, the points of its interruptions), which changes nothing; and a proof each, with
the interruptions as they happened: step and phase are those of the last heartbeat before the hit.

The runs are as in `refiner run`, each in its own workspace, one of them interrupted. Both runs of a
proof use one copy of the code, as the checkout may be edited meanwhile. Workers are hit from
outside (SIGKILL to the process group, or a request to stop), by their files on disk, as by a
scheduler or a failing node.
"""

from __future__ import annotations

import io
import json
import random
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flows.running.calls import (
    CodeSnapshot,
    check_supported,
    make_recipe_plan,
    pin_code,
    record_run,
    work_on,
)
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
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, StageFailed
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.proofs import (
    PROOF_VERSION,
    How,
    Interruption,
    ProofComparison,
    ResumeProof,
)
from refiner_core.contract.records import to_json
from refiner_core.report.printing import counted

Trained = Literal["sft", "grpo"]
TRAINED: tuple[Trained, ...] = get_args(Trained)
#: Phases in which a worker can be hit, by stage: those of its heartbeat, and `save`.
PHASES: dict[Trained, tuple[str, ...]] = {
    "sft": ("update", "save"),
    "grpo": ("generate", "judge", "update", "save"),
}
_STEPS_FIELD = {"sft": "sft.max_train_steps", "grpo": "grpo.num_training_steps"}
#: Maximum delay of a hit after the start of its phase, seconds.
_DELAY_S = 0.1
_HOW: dict[How, str] = {"kill": "kill -9", "stop": "asked to stop"}
#: Differences that count as none on GPUs: some kernels sum in a different order at every call.
TOLERANCES = {"float32": 0.01, "bfloat16": 0.05}


@dataclass(frozen=True)
class _InterruptionPoint:
    """Point at which a worker is hit: in this step (counted from 1) and phase, or as soon after as
    possible, with this delay."""

    step: int
    phase: str
    how: How
    delay_s: float


@dataclass(frozen=True)
class _ProofStage:
    """One stage to prove: in the whole recipe, and in its shortened form."""

    kind: Trained
    full: PlannedStage
    short: PlannedStage
    points: tuple[_InterruptionPoint, ...]
    tolerance: float


@dataclass(frozen=True)
class ProofPlans:
    """Complete plan of a proof.

    Attributes
    ----------
    overrides
        The caller's; ``changed`` has the further settings of the runs: field -> value.
    given
        Ids of stages that the workspace already has: they are reused.
    """

    recipe: str
    overrides: tuple[str, ...]
    config: RecipeConfig
    steps: int
    interruptions: int
    seed: int
    stages: tuple[_ProofStage, ...]
    changed: dict[str, Any]
    given: frozenset[str]

    @property
    def words(self) -> tuple[str, ...]:
        """All overrides of the shortened recipe."""
        return *self.overrides, *(f"{path}={json.dumps(v)}" for path, v in self.changed.items())


def plan_resume_proofs(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    stage: Literal["sft", "grpo", "all"] = "all",
    steps: int = 12,
    interruptions: int = 4,
    seed: int = 0,
) -> ProofPlans:
    """Plan the straight and the interrupted trainings of a recipe, and their interruptions.

    Parameters
    ----------
    recipe, overrides
        As for :func:`flows.api.run_recipe`.
    stage
        The training to prove; earlier ones run once.
    steps, interruptions
        Numbers of steps and interruptions of each training.
    seed
        Seed of steps and phases.

    Returns
    -------
    ProofPlans
        For :func:`flows.api.prove_resume`.

    Raises
    ------
    ConfigurationError
        The recipe has no training that can be proven, or an option is invalid.
    UnsupportedError
        It cannot be run here.
    """
    whole = make_recipe_plan(recipe, overrides)
    full = {s.kind: s for s in whole.stages}
    kinds = [kind for kind in TRAINED if kind in full and stage in (kind, "all")]
    if not kinds:
        wanted = "sft or grpo" if stage == "all" else stage
        raise ConfigurationError(
            f"Recipe {recipe} has no stage {wanted} that could be proven.",
            expected=f"a recipe that trains with refiner; its stages are "
            f"{', '.join(whole.config.stages)}",
            fix="name another recipe or --stage (an external trainer's resume cannot be proven)",
        )
    # Each interruption has a phase of a step to itself; the last step may end unseen.
    most = min(len(PHASES[kind]) for kind in kinds) * (steps - 1)
    if not 1 <= interruptions <= most:
        raise ConfigurationError(
            f"--interruptions is {interruptions} in --steps {steps}.",
            expected=f"at least 1, at most {max(1, most)}: each phase of each step but the last",
            fix="give other values, or leave them out",
        )
    workspace = Workspace.read_only(whole.config.workspace)
    trained = [kind for kind in TRAINED[: TRAINED.index(kinds[-1]) + 1] if kind in full]
    # Often enough for a checkpoint near every point, rarely enough that some steps have to be
    # repeated.
    save_freq = max(1, min(steps // 4, 5))
    changed: dict[str, Any] = {
        "stages": ["data", *trained],
        "tracking.wandb": "disabled",
        "dispatch.executor": "local",
        "dispatch.retries.killed": -1,
    }
    for kind in trained:  # earlier trainings are shortened, too, unless they exist
        if kind in kinds or workspace.read_result(full[kind].id) is None:
            changed |= {_STEPS_FIELD[kind]: steps, f"{kind}.save_freq": save_freq}
    asked = (recipe, tuple(overrides), whole.config, steps, interruptions, seed)
    plans = ProofPlans(*asked, (), changed, frozenset())
    short = make_recipe_plan(recipe, plans.words)
    check_supported(short.config)
    stages = []
    for kind in kinds:
        gpus, agent = getattr(short.config, kind).resources.gpus, short.config.environment.name
        points = draw_points(kind, steps, interruptions, seed, save_freq, agent=bool(agent))
        tolerance = TOLERANCES.get(short.config.model.dtype, 0.01) if gpus else 0.0
        stages.append(_ProofStage(kind, full[kind], short.by_name[kind], points, tolerance))
    done = [s.id for s in short.stages if s.kind not in kinds and workspace.read_result(s.id)]
    return ProofPlans(*asked, tuple(stages), changed, frozenset(done))


def draw_points(
    kind: Trained, steps: int, interruptions: int, seed: int, save_freq: int, *, agent: bool = False
) -> tuple[_InterruptionPoint, ...]:
    """Random steps and phases, by the seed; every phase is used before one repeats, and kills
    alternate with requests to stop."""
    rng = random.Random(f"{seed}/{kind}")
    phases: list[str] = []
    while len(phases) < interruptions:
        phases += rng.sample(PHASES[kind], len(PHASES[kind]))
    # Steps differ while there are enough; the last one may end unseen.
    rounds = -(-interruptions // (steps - 1))
    chosen = sorted(rng.sample([*range(1, steps)] * rounds, interruptions))
    points = []
    for step, phase in zip(chosen, phases, strict=False):
        if phase == "save":  # the next save, which must not be that of the last step
            due = -(-step // save_freq) * save_freq
            step = due if due < steps else max(save_freq, due - save_freq)
        # Name of a phase in the training of agents.
        name = "score" if agent and phase == "judge" else phase
        points.append((step, name, _DELAY_S * rng.random()))
    ways: tuple[How, ...] = get_args(How)
    return tuple(
        _InterruptionPoint(step, phase, ways[place % 2], delay)
        for place, (step, phase, delay) in enumerate(sorted(points, key=lambda p: p[0]))
    )


def plan_lines(plans: ProofPlans) -> list[str]:
    """Lines on the work to come."""
    changed = (f"{path}={json.dumps(v)}" for path, v in plans.changed.items())
    return [
        f"Proving exact resume of {' and '.join(s.kind for s in plans.stages)} of {plans.recipe}: "
        f"{plans.steps} steps straight, and once more with interruptions: {plans.interruptions} "
        f"(seed {plans.seed}).",
        f"Changed for it: {', '.join(changed)}",
    ]


def interruption_line(found: Interruption) -> str:
    """One interruption, in words."""
    return f"{_HOW[found.how]} in step {found.step} ({found.phase})"


def proof_lines(proof: ResumeProof) -> list[str]:
    """A verdict and its basis."""
    times = counted(len(proof.interruptions), "time")
    lines = [
        f"{proof.stage}: {proof.verdict}",
        f"  {proof.steps} steps, interrupted {times}, up to {proof.tolerance:g} apart allowed",
    ]
    for found in proof.interruptions:
        resumed = found.resumed_from_step
        went_on = "started again" if resumed is None else f"resumed from step {resumed}"
        lines.append(f"  {interruption_line(found)}, {went_on}")
    for one in proof.comparisons:
        size = "some without a size" if one.largest is None else f"the largest {one.largest:.3g}"
        said = f"{one.differing} of {one.compared} differ, {size}"
        same = f"{one.compared} compared, all bitwise the same"
        lines.append(f"  {one.quantity}: {said if one.differing else same}")
    if (first := proof.first) is not None:
        at = "at the end" if first.first_step is None else f"at step {first.first_step}"
        lines.append(f"  The first difference, {at}: {first.quantity}, {first.first}")
    return lines


def next_line(proofs: Sequence[ResumeProof], plans: ProofPlans) -> str:
    """Suggested next command."""
    words = shlex.join([plans.recipe, *plans.overrides])
    if exit_code(proofs):
        return (
            "Next: look at the first difference (the logs of both runs are in the kept "
            f"folder), fix it, and `refiner prove-resume {words} --seed {plans.seed}`"
        )
    return f"Next: `refiner run {words}`; cards of its models show this verdict."


def proofs_json(proofs: Sequence[ResumeProof]) -> dict[str, Any]:
    """Proofs as JSON."""
    made = [{**to_json(p), "verdict": p.verdict} for p in proofs]
    return {"version": 1, "exit_code": exit_code(proofs), "proofs": made}


def exit_code(proofs: Sequence[ResumeProof]) -> int:
    """1 if a stage diverged, else 0."""
    return int(any(p.verdict == "diverged" for p in proofs))


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
    plans: ProofPlans, one: _ProofStage, straight: Workspace, pinned: CodeSnapshot, tell: Tell
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
    sides = [_read_trained(side, one.short.id) for side in (straight, other)]
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
    paths: StagePaths, one: _ProofStage, hit: Callable[[Interruption], None], over: threading.Event
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
