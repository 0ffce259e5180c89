"""What is wrong with a sweep, found before anything is launched.

In: a sweep with its arms and the plans of all its trials. Out: nothing, or warnings for what may be
meant; a refusal for what cannot be, naming the field, arm or seed and what mends it. What only the
*question* can be wrong about (its metric, and whether arms are measured alike) is in
:mod:`sweeps.questions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import field_info, replace_fields
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.placement import STAGES
from refiner_core.contract.plan import Plan, uses
from sweeps.dormant import DORMANT, why_without_effect
from sweeps.questions import check_question
from sweeps.values import SweepFile, SweepPlan

Plans = Mapping[str, Sequence[Plan]]
#: Kinds of stages that make or measure a model.
MEASURED = frozenset(("data", *STAGES, "sample", "command", "evaluate"))
#: Execution fields by name, but what is computed follows from them.
_COMPUTES = frozenset(("stages",))
#: These say which evaluations there are; all arms have the same.
_FOR_ALL = ("evaluate.protocols", "evaluate.models")


def varied_fields(sweep: SweepFile) -> dict[str, str]:
    """Every field that arms may differ in, and the key of the file that varies it."""
    found = dict.fromkeys(sweep.factors, "factors")
    found |= dict.fromkeys(chain.from_iterable(sweep.zipped), "zip")
    found |= {field: f"arms: {arm}" for arm, values in sweep.arms.items() for field in values}
    return found


def check_fields(sweep: SweepFile, base: RecipeConfig) -> None:
    """Refuse to vary what a sweep cannot be about.

    Raises
    ------
    ConfigurationError
        A field that changes nothing that is computed, or one that is the sweep's own.
    """
    fixed = {text.partition("=")[0] for text in sweep.overrides}
    for field, key in varied_fields(sweep).items():
        info = field_info(field, f"`{key}` of sweep {sweep.name}")
        if field in fixed and not key.startswith("arms"):
            raise ConfigurationError(
                f"`{field}` is varied by `{key}` of sweep {sweep.name}, and set for all trials.",
                expected="one of the two",
                fix=f"drop `{field}` from the overrides",
            )
        if info.mark == "execution" and field not in _COMPUTES:
            raise ConfigurationError(
                f"`{key}` of sweep {sweep.name} varies `{field}`, which changes where or how "
                "something runs, never what is computed: the arms would be one and the same.",
                expected="fields that change what is computed",
                fix=f"set it for all trials: `overrides: [{field}=…]`",
            )
        if field in _FOR_ALL:
            raise ConfigurationError(
                f"`{key}` of sweep {sweep.name} varies `{field}`: arms that are not measured alike "
                "cannot be compared.",
                expected="the same evaluations for all arms",
                fix=f"set it for all trials: `overrides: [{field}=…]`",
            )
    if "seed" in fixed:
        raise ConfigurationError(
            f"`seed` is set for all trials of sweep {sweep.name}.",
            expected="run seeds in the file: every arm is tried with each",
            fix="write `seeds: [1, 2, 3]` into it",
        )


def check_trials(
    plan: SweepPlan, by_arm: Plans, plan_as: Callable[[RecipeConfig], Plan]
) -> tuple[str, ...]:
    """Refuse trials from which nothing could be learned; return what is only doubtful.

    Parameters
    ----------
    by_arm
        The plans of each arm, seed by seed.
    plan_as
        Plans a configuration that is no trial's.

    Raises
    ------
    ConfigurationError
        Arms that are one, seeds that reach no training, one repository for two models, a question
        that the recipe cannot answer.
    """
    sweep = plan.sweep
    _check_seeds(sweep, by_arm)
    _check_arms(plan, by_arm, plan_as)
    _check_publications(sweep, by_arm)
    warnings = check_question(plan, varied_fields(sweep))
    if len(plan.arms) == 1:
        warnings.append("The sweep has one arm: its seeds show a spread, but nothing is compared.")
    return tuple(warnings)


def measured_stages(plan: Plan) -> frozenset[str]:
    """Ids of the stages that make or measure a model: what a trial *is*."""
    return frozenset(s.id for s in plan.stages if s.kind in MEASURED)


# ---------------------------------------------------------------- seeds


def _check_seeds(sweep: SweepFile, plans: Plans) -> None:
    if len(sweep.seeds) == 1:
        return
    for arm, by_seed in plans.items():
        config = by_seed[0].config
        deaf = _deaf_command(config)
        if not deaf and measured_stages(by_seed[0]) != measured_stages(by_seed[1]):
            continue
        trains = [k for k in config.stages if k in TRAINED]
        why = f"none of its stages ({', '.join(config.stages)}) is trained with a seed"
        if "command" in trains:
            why = deaf or "weights that were adopted have none"
        raise ConfigurationError(
            f"The seeds {', '.join(map(str, sweep.seeds))} of sweep {sweep.name} do not reach arm "
            f"{arm}: {why}, so that its trials would all be the same.",
            expected="seeds that change what is trained, or one seed",
            fix="write {seed} into `command.run`" if deaf else "write `seeds: [1]`",
        )


def _deaf_command(config: RecipeConfig) -> str:
    """Why a recipe's only trainer never hears of the seed; empty where it does."""
    trains = {*TRAINED} & set(config.stages)
    if trains != {"command"} or config.command.adopted or uses(config.command, "seed"):
        return ""
    return "`command.run` does not name {seed}"


# ---------------------------------------------------------------- arms


def _check_arms(plan: SweepPlan, by_arm: Plans, plan_as: Callable[[RecipeConfig], Plan]) -> None:
    """Every arm is another thing than every other one."""
    sweep, baseline = plan.sweep, plan.baseline
    sleeping = [field for field in varied_fields(sweep) if field in DORMANT]
    known: dict[frozenset[str], str] = {}
    for arm in (baseline, *(arm for arm in by_arm if arm != baseline)):
        found = by_arm[arm][0]
        stages = measured_stages(_awake(found, sleeping, plan_as))
        other = known.setdefault(stages, arm)
        if other != arm:
            raise _same(plan, arm, other, found, by_arm[other][0])


def _awake(plan: Plan, fields: Sequence[str], plan_as: Callable[[RecipeConfig], Plan]) -> Plan:
    """The plan with fields that nothing reads at one and the same value."""
    config = plan.config
    idle = {f: field_info(f).default for f in fields if DORMANT[f].idle(config)}
    return plan_as(replace_fields(config, idle)) if idle else plan


def _same(plan: SweepPlan, arm: str, other: str, found: Plan, known: Plan) -> ConfigurationError:
    """A refusal of two arms that would be one, saying why what they differ in has no effect."""
    sweep = plan.sweep
    differ = [
        f for f in varied_fields(sweep) if get_field(found.config, f) != get_field(known.config, f)
    ]
    whys = [f"`{f}` {why_without_effect(f, found, known)}" for f in differ]
    because = "; ".join(whys) or "they set the same fields to the same values"
    if other == plan.baseline:
        what = f"Arm {arm} of sweep {sweep.name} changes nothing against the baseline {other}"
    else:
        what = f"Arms {other} and {arm} of sweep {sweep.name} are the same"
    return ConfigurationError(
        f"{what}: every stage that trains or measures is the same one, because {because}.",
        expected="arms that differ in what is trained or measured",
        fix=f"drop {arm} (see `exclude`), or change what keeps its fields from having an effect",
    )


# ---------------------------------------------------------------- where models are published


def _check_publications(sweep: SweepFile, plans: Plans) -> None:
    """Two models never go to one repository."""
    taken: dict[tuple[str, str], tuple[str, str]] = {}
    for arm, by_seed in plans.items():
        publish = by_seed[0].config.publish
        if "publish" not in by_seed[0].config.stages or "{fingerprint}" in publish.repo_id:
            continue
        for seed, plan in zip(sweep.seeds, by_seed, strict=True):
            weights = [
                p.input_fingerprints["weights"] for p in plan.stages if p.name in _LAST and p.inputs
            ]
            if not weights:
                continue
            trial = f"{arm}/seed{seed}"
            repository = publish.repo_id.replace("{seed}", str(seed))
            place = (f"{publish.target}:{publish.path}", repository)
            before = taken.setdefault(place, (weights[0], trial))
            if before[0] != weights[0]:
                raise ConfigurationError(
                    f"Trials {before[1]} and {trial} of sweep {sweep.name} would be published to "
                    f"one repository, {repository!r}.",
                    expected="a repository for each model",
                    fix="write {fingerprint} (and {seed}) into publish.repo_id, or leave `publish` "
                    "out of `stages`",
                )


_LAST = frozenset(("publish", "publish-best"))
