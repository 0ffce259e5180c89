"""Plan of a proof, and the lines and JSON of a proof and its plan.

In: a recipe with overrides, and the options of the command. Out: a :class:`Plans`: stages, how each
is shortened, and at which points it is interrupted. Changes nothing.
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flows.running.calls import check_supported, make_recipe_plan
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
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
_STEPS_FIELD = {"sft": "sft.max_train_steps", "grpo": "grpo.num_training_steps"}
#: A hit comes up to so long after its phase has begun.
_DELAY_S = 0.1
_HOW: dict[How, str] = {"kill": "kill -9", "stop": "asked to stop"}
#: Differences that count as none on GPUs: some of their kernels take sums in another order at every
#: call.
TOLERANCES = {"float32": 0.01, "bfloat16": 0.05}


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
    """One stage to prove: of the whole recipe, and as it is run."""

    kind: Trained
    full: PlannedStage
    short: PlannedStage
    points: tuple[Point, ...]
    tolerance: float


@dataclass(frozen=True)
class Plans:
    """All that a proof will do.

    Attributes
    ----------
    overrides
        The caller's; ``changed`` is what the runs have besides: field -> value.
    given
        Ids of stages that the workspace has already: they are taken as they are.
    """

    recipe: str
    overrides: tuple[str, ...]
    config: RecipeConfig
    steps: int
    interruptions: int
    seed: int
    stages: tuple[OneStage, ...]
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
) -> Plans:
    """Which trainings of a recipe would be run straight and interrupted, and where they are hit.

    Parameters
    ----------
    recipe, overrides
        As for :func:`flows.api.run_recipe`.
    stage
        Which training is proven; those before it run once.
    steps, interruptions
        Of each training.
    seed
        Draws steps and phases.

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
    whole = make_recipe_plan(recipe, overrides)
    full = {s.kind: s for s in whole.stages}
    kinds = [kind for kind in TRAINED if kind in full and stage in (kind, "all")]
    if not kinds:
        wanted = "sft or grpo" if stage == "all" else stage
        raise ConfigurationError(
            f"Recipe {recipe} has no stage {wanted} that could be proven.",
            expected=f"a recipe that trains with refiner; its stages are "
            f"{', '.join(whole.config.stages)}",
            fix="name another recipe or --stage (another trainer's resume is its own affair)",
        )
    # Each interruption has a phase of a step to itself; the last step may be over unseen.
    most = min(len(PHASES[kind]) for kind in kinds) * (steps - 1)
    if not 1 <= interruptions <= most:
        raise ConfigurationError(
            f"--interruptions is {interruptions} in --steps {steps}.",
            expected=f"at least 1, at most {max(1, most)}: each phase of each step but the last",
            fix="give other values, or leave them out",
        )
    workspace = Workspace.read_only(whole.config.workspace)
    trained = [kind for kind in TRAINED[: TRAINED.index(kinds[-1]) + 1] if kind in full]
    # Often enough that every point has a checkpoint near it, seldom enough that what was done
    # since the last one has to be done again.
    save_freq = max(1, min(steps // 4, 5))
    changed: dict[str, Any] = {
        "stages": ["data", *trained],
        "tracking.wandb": "disabled",
        "dispatch.executor": "local",
        "dispatch.retries.killed": -1,
    }
    for kind in trained:  # those before the proven ones are shortened, too, unless they are there
        if kind in kinds or workspace.read_result(full[kind].id) is None:
            changed |= {_STEPS_FIELD[kind]: steps, f"{kind}.save_freq": save_freq}
    asked = (recipe, tuple(overrides), whole.config, steps, interruptions, seed)
    plans = Plans(*asked, (), changed, frozenset())
    short = make_recipe_plan(recipe, plans.words)
    check_supported(short.config)
    stages = []
    for kind in kinds:
        gpus, agent = getattr(short.config, kind).resources.gpus, short.config.environment.name
        points = draw_points(kind, steps, interruptions, seed, save_freq, agent=bool(agent))
        tolerance = TOLERANCES.get(short.config.model.dtype, 0.01) if gpus else 0.0
        stages.append(OneStage(kind, full[kind], short.by_name[kind], points, tolerance))
    done = [s.id for s in short.stages if s.kind not in kinds and workspace.read_result(s.id)]
    return Plans(*asked, tuple(stages), changed, frozenset(done))


def draw_points(
    kind: Trained, steps: int, interruptions: int, seed: int, save_freq: int, *, agent: bool = False
) -> tuple[Point, ...]:
    """Steps and phases at random, by the seed; every phase comes up before one comes up again, and
    kills and requests to stop take turns."""
    rng = random.Random(f"{seed}/{kind}")
    phases: list[str] = []
    while len(phases) < interruptions:
        phases += rng.sample(PHASES[kind], len(PHASES[kind]))
    # Steps differ as long as there are enough; the last one may be over before it is seen.
    rounds = -(-interruptions // (steps - 1))
    chosen = sorted(rng.sample([*range(1, steps)] * rounds, interruptions))
    points = []
    for step, phase in zip(chosen, phases, strict=False):
        if phase == "save":  # the next one, which must not be that of the last step
            due = -(-step // save_freq) * save_freq
            step = due if due < steps else max(save_freq, due - save_freq)
        # What the trainer calls a phase where it trains an agent.
        name = "score" if agent and phase == "judge" else phase
        points.append((step, name, _DELAY_S * rng.random()))
    ways: tuple[How, ...] = get_args(How)
    return tuple(
        Point(step, phase, ways[place % 2], delay)
        for place, (step, phase, delay) in enumerate(sorted(points, key=lambda p: p[0]))
    )


def plan_lines(plans: Plans) -> list[str]:
    """Lines on what is about to be done."""
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
    """A verdict and what it rests on."""
    times = counted(len(proof.interruptions), "time")
    lines = [
        f"{proof.stage}: {proof.verdict}",
        f"  {proof.steps} steps, interrupted {times}, up to {proof.tolerance:g} apart allowed",
    ]
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


def next_line(proofs: Sequence[ResumeProof], plans: Plans) -> str:
    """What to do next."""
    words = shlex.join([plans.recipe, *plans.overrides])
    if exit_code(proofs):
        return (
            "Next: look where the first difference stands (the logs of both runs are in the kept "
            f"folder), mend it, and `refiner prove-resume {words} --seed {plans.seed}`"
        )
    return f"Next: `refiner run {words}`; cards of what it trains show this verdict."


def proofs_json(proofs: Sequence[ResumeProof]) -> dict[str, Any]:
    """For scripts."""
    made = [{**to_json(p), "verdict": p.verdict} for p in proofs]
    return {"version": 1, "exit_code": exit_code(proofs), "proofs": made}


def exit_code(proofs: Sequence[ResumeProof]) -> int:
    """1 where a stage diverged, else 0."""
    return int(any(p.verdict == "diverged" for p in proofs))
