"""Plan of a proof, and the lines and JSON of a proof and its plan.

In: a recipe with overrides, and the options of the command. Out: a :class:`ProofPlans`: stages, how
each is shortened, and the points of its interruptions. Changes nothing.
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
class InterruptionPoint:
    """Point at which a worker is hit: in this step (counted from 1) and phase, or as soon after as
    possible, with this delay."""

    step: int
    phase: str
    how: How
    delay_s: float


@dataclass(frozen=True)
class ProofStage:
    """One stage to prove: in the whole recipe, and in its shortened form."""

    kind: Trained
    full: PlannedStage
    short: PlannedStage
    points: tuple[InterruptionPoint, ...]
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
    stages: tuple[ProofStage, ...]
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
        stages.append(ProofStage(kind, full[kind], short.by_name[kind], points, tolerance))
    done = [s.id for s in short.stages if s.kind not in kinds and workspace.read_result(s.id)]
    return ProofPlans(*asked, tuple(stages), changed, frozenset(done))


def draw_points(
    kind: Trained, steps: int, interruptions: int, seed: int, save_freq: int, *, agent: bool = False
) -> tuple[InterruptionPoint, ...]:
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
        InterruptionPoint(step, phase, ways[place % 2], delay)
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
