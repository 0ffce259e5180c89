"""Plan of a proof, and the lines and JSON of a proof and its plan.

In: a recipe with overrides, and the options of the command. Out: a :class:`Plans`: stages, how each
is shortened, and at which points it is interrupted. Changes nothing.
"""

from __future__ import annotations

import json
import math
import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flows.running.calls import check_supported, make_recipe_plan
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.placement import placement_of
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.proofs import How, Interruption, ResumeProof
from refiner_core.contract.records import to_json
from refiner_core.report.printing import counted

Trained = Literal["sft", "grpo"]
TRAINED: tuple[Trained, ...] = get_args(Trained)
#: Where a worker can be hit, by stage: as its heartbeat names it, and `save`.
PHASES: dict[Trained, tuple[str, ...]] = {
    "sft": ("update", "save"),
    "grpo": ("generate", "judge", "update", "save"),
}
#: What the trainer calls a phase where it trains an agent.
_OF_AGENTS = {"judge": "score"}
#: A hit comes up to so long after its phase has begun.
_DELAY_S = 0.1
_STEPS_FIELD: dict[Trained, str] = {
    "sft": "sft.max_train_steps",
    "grpo": "grpo.num_training_steps",
}
#: Differences that count as none, where not only the same bits will do: sums are taken in another
#: order on another number of processes, and some kernels of GPUs do so at every call.
TOLERANCES = {"float32": 0.01, "bfloat16": 0.05}


@dataclass(frozen=True)
class Asked:
    """Options of the command; None is the recipe's own."""

    recipe: str
    overrides: tuple[str, ...] = ()
    stage: Literal["sft", "grpo", "all"] = "all"
    steps: int = 12
    interruptions: int = 4
    seed: int = 0
    how: Literal["kill", "stop", "both"] = "both"
    processes: int | None = None
    resume_processes: int | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Point:
    """Point at which a worker is to be hit: in this step (counted from 1) and phase, or as soon
    after it as can be, and so much later."""

    step: int
    phase: str
    how: How
    delay_s: float


@dataclass(frozen=True)
class OneStage:
    """One stage to prove."""

    kind: Trained
    full: PlannedStage  # of the whole recipe
    short: PlannedStage  # as it is run
    overrides: tuple[str, ...]  # of both runs, behind the caller's
    points: tuple[Point, ...]
    tolerance: float
    processes: int  # per node
    resumed_on: int | None  # processes per node after the first interruption, where other ones


@dataclass(frozen=True)
class Plans:
    """All that a proof will do.

    Attributes
    ----------
    changed
        Field -> value that the runs have and the recipe has not.
    given
        Ids of stages that the workspace has already: they are taken as they are.
    """

    asked: Asked
    config: RecipeConfig
    stages: tuple[OneStage, ...]
    changed: dict[str, Any]
    given: frozenset[str]


def plan_resume_proofs(recipe: str, overrides: Sequence[str] = (), **options: Any) -> Plans:
    """Which trainings of a recipe would be run straight and interrupted, and where they are hit.

    Parameters
    ----------
    recipe, overrides
        As for :func:`flows.api.run_recipe`.
    **options
        Fields of :class:`flows.proving.planning.Asked`: ``stage``, ``steps``, ``interruptions``,
        ``seed``, ``how``, ``processes``, ``resume_processes``, ``tolerance``.

    Returns
    -------
    Plans
        For :func:`flows.api.prove_resume`.

    Raises
    ------
    ConfigurationError
        The recipe trains nothing that can be proven, or an option cannot be meant.
    UnsupportedError
        It cannot be run here.
    """
    asked = Asked(recipe, tuple(overrides), **options)
    whole = make_recipe_plan(asked.recipe, asked.overrides)
    kinds = _kinds(asked, whole)
    _check(asked, kinds)
    workspace = Workspace.read_only(whole.config.workspace)
    changed = _changed(asked, whole, kinds, workspace)
    overrides = (*asked.overrides, *(f"{path}={json.dumps(v)}" for path, v in changed.items()))
    short = make_recipe_plan(asked.recipe, overrides)
    check_supported(short.config)
    done = (s.id for s in short.stages if s.kind not in kinds)
    stages = tuple(_one(kind, asked, whole, short, overrides) for kind in kinds)
    given = frozenset(i for i in done if workspace.read_result(i) is not None)
    return Plans(asked, whole.config, stages, changed, given)


def _check(asked: Asked, kinds: Sequence[Trained]) -> None:
    """Refuse what cannot be meant. Each interruption has a phase of a step to itself; the last step
    has none, since it may be over before it is seen."""
    most = min(len(PHASES[kind]) for kind in kinds) * (asked.steps - 1)
    for option, value, least, limit in (
        ("--steps", asked.steps, 2, math.inf),  # one to be interrupted in, and one after it
        ("--interruptions", asked.interruptions, 1, most),
        ("--processes", asked.processes, 1, math.inf),
        ("--resume-processes", asked.resume_processes, 1, math.inf),
        ("--tolerance", asked.tolerance, 0, math.inf),
    ):
        if value is not None and not least <= value <= limit:  # which NaN is not, either
            expected = f"at least {least}"
            if limit < math.inf:
                expected += f", at most {limit}: each phase of each step but the last"
            fix = "give another value, or leave it out"
            raise ConfigurationError(f"{option} is {value}.", expected=expected, fix=fix)


def _kinds(asked: Asked, whole: Plan) -> tuple[Trained, ...]:
    there = {s.kind for s in whole.stages}
    found = tuple(k for k in TRAINED if k in there and asked.stage in (k, "all"))
    if not found:
        wanted = "sft or grpo" if asked.stage == "all" else asked.stage
        raise ConfigurationError(
            f"Recipe {asked.recipe} has no stage {wanted} that could be proven.",
            expected=f"a recipe that trains with refiner; its stages are "
            f"{', '.join(whole.config.stages)}",
            fix="name another recipe or --stage (another trainer's resume is its own affair)",
        )
    return found


def _changed(
    asked: Asked, whole: Plan, kinds: Sequence[Trained], workspace: Workspace
) -> dict[str, Any]:
    """Fields that the runs have otherwise. Stages before the proven ones are shortened too, unless
    the workspace has them."""
    last = TRAINED.index(kinds[-1])
    trained = [k for k in TRAINED[: last + 1] if k in whole.config.stages]
    found: dict[str, Any] = {
        "stages": ["data", *trained],
        "tracking.wandb": "disabled",
        "dispatch.executor": "local",
        "dispatch.retries.killed": -1,
    }
    for kind in trained:
        if asked.processes is not None and kind in kinds:
            found[f"{kind}.nproc_per_node"] = asked.processes
        stage = next(s for s in whole.stages if s.kind == kind)
        if kind not in kinds and workspace.read_result(stage.id) is not None:
            continue
        found[_STEPS_FIELD[kind]] = asked.steps
        # Often enough that every point has a checkpoint near it, seldom enough that what was done
        # since the last one has to be done again.
        found[f"{kind}.save_freq"] = max(1, min(asked.steps // 4, 5))
    return found


def _one(
    kind: Trained, asked: Asked, whole: Plan, short: Plan, overrides: tuple[str, ...]
) -> OneStage:
    full, stage = (next(s for s in plan.stages if s.kind == kind) for plan in (whole, short))
    config = short.config
    save_freq = int(getattr(config, kind).save_freq)
    points = draw_points(kind, asked, save_freq, agent=bool(config.environment.name))
    processes = placement_of(config, kind).nproc_per_node
    other = asked.resume_processes if asked.resume_processes != processes else None
    if other is not None:  # refused now, not when half of the work is done
        make_recipe_plan(asked.recipe, (*overrides, f"{kind}.nproc_per_node={other}"))
    tolerance = asked.tolerance
    if tolerance is None:
        inexact = other is not None or getattr(config, kind).resources.gpus
        tolerance = TOLERANCES.get(config.model.dtype, 0.01) if inexact else 0.0
    return OneStage(kind, full, stage, overrides, points, tolerance, processes, other)


def draw_points(
    kind: Trained, asked: Asked, save_freq: int, *, agent: bool = False
) -> tuple[Point, ...]:
    """Steps and phases at random, by the seed; every phase comes up before one comes up again."""
    rng = random.Random(f"{asked.seed}/{kind}")
    ways: tuple[How, ...] = ("kill", "stop") if asked.how == "both" else (asked.how,)
    phases: list[str] = []
    while len(phases) < asked.interruptions:
        phases += rng.sample(PHASES[kind], len(PHASES[kind]))
    # The last step may be over before it is seen; and steps differ as long as there are enough.
    steps = list(range(1, asked.steps))
    rounds = -(-asked.interruptions // len(steps))
    chosen = rng.sample(steps * rounds, asked.interruptions)
    first = rng.randrange(len(ways))
    points = []
    for place, (step, phase) in enumerate(zip(sorted(chosen), phases, strict=False)):
        if agent:
            phase = _OF_AGENTS.get(phase, phase)
        if phase == "save":  # the next one, which must not be that of the last step
            due = -(-step // save_freq) * save_freq
            step = due if due < asked.steps else max(save_freq, due - save_freq)
        points.append(
            Point(step, phase, ways[(first + place) % len(ways)], _DELAY_S * rng.random())
        )
    return tuple(sorted(points, key=lambda p: p.step))


_HOW = {"kill": "kill -9", "stop": "asked to stop"}


def plan_lines(plans: Plans) -> list[str]:
    """Lines on what is about to be done."""
    asked = plans.asked
    names = " and ".join(s.kind for s in plans.stages)
    lines = [
        f"Proving exact resume of {names} of {asked.recipe}: {asked.steps} steps straight, and "
        f"once more with interruptions: {asked.interruptions} (seed {asked.seed}).",
        "Changed for it: "
        + ", ".join(f"{path}={json.dumps(v)}" for path, v in plans.changed.items()),
    ]
    if plans.given:
        lines.append("Taken from the workspace: " + ", ".join(sorted(plans.given)))
    return lines


def interruption_line(found: Interruption) -> str:
    """One interruption, in words."""
    return f"{_HOW[found.how]} in step {found.step} ({found.phase})"


def proof_lines(proof: ResumeProof) -> list[str]:
    """A verdict and what it rests on."""
    text = f"{proof.steps} steps, interrupted {counted(len(proof.interruptions), 'time')}"
    if len(proof.interruptions) < proof.wanted:
        text += f" ({proof.wanted} wanted; it was over before)"
    if not proof.same_processes:
        text += f", resumed on {proof.resume_processes} processes per node after {proof.processes}"
    if proof.tolerance:
        text += f", differences up to {proof.tolerance:g} allowed"
    lines = [f"{proof.stage}: {proof.verdict}", f"  {text}"]
    for found in proof.interruptions:
        resumed = found.resumed_from_step
        went_on = "began anew" if resumed is None else f"went on from step {resumed}"
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


def next_lines(proofs: Sequence[ResumeProof], plans: Plans) -> list[str]:
    """Lines on what to do next."""
    asked = plans.asked
    words = shlex.join([asked.recipe, *asked.overrides])
    if any(p.verdict == "diverged" for p in proofs):
        return [
            "Next: look where the first difference stands (the logs of both runs are in the kept "
            "folder), and prove it again after mending it:",
            f"  refiner prove-resume {words} --seed {asked.seed}",
        ]
    return [f"Next: `refiner run {words}`; cards of what it trains show this verdict."]


def proofs_json(proofs: Sequence[ResumeProof]) -> dict[str, Any]:
    """For scripts."""
    return {
        "version": 1,
        "exit_code": exit_code(proofs),
        "proofs": [{**to_json(p), "verdict": p.verdict} for p in proofs],
    }


def exit_code(proofs: Sequence[ResumeProof]) -> int:
    """1 where a stage diverged, else 0."""
    return int(any(p.verdict == "diverged" for p in proofs))
