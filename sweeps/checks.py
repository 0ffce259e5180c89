"""Mistakes in a sweep, found before anything is launched.

In: a sweep with its arms and the plans of all its trials. Out: nothing, or warnings for what may be
meant; a refusal for what cannot be, naming the field, arm or seed and what mends it.

Numbers of different protocols are never compared, so an arm that changes its own yardstick (the
judge, the rubrics, how long an answer may be) has to be measured by one that it does not change: a
protocol file. How judgements become one reward is part of the metric `reward` alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from refiner_core.contract.config import RecipeConfig, uses
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import field_info, replace_fields, suggest
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.placement import STAGES
from refiner_core.contract.plan import Plan, final_model
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.protocols import FIELDS, ProtocolFile, protocols_of
from refiner_core.evaluation.metrics import has_metric, metrics_of, weighed
from sweeps.power import aim_of
from sweeps.values import Question, SweepFile, SweepPlan

#: What nothing reads: the field that decides that, its values, as text, where it is so, and fields.
DORMANT: tuple[tuple[str, ...], ...] = (
    ("grpo.beta", r"0(\.0)?$", "grpo.kl_estimator"),
    ("reward.rubric_source", "(instance|none)$", "reward.static_rubrics"),
    ("reward.rubric_source", "instance$", "reward.instance_rubrics_only"),
    ("reward.rubric_source", "none", "reward.rubric_aggregation"),
    ("reward.instance_rubrics_only", "True", "reward.static_rubrics"),
    ("reward.apply_paper_citation_reward", "False",
     "reward.paper_citation_weight", "reward.combination"),
    ("reward.paper_citation_weight", r"0(\.0)?$", "reward.combination"),
    ("reward.non_stop_penalty", "False", "reward.non_stop_penalty_value"),
    ("sft.optimizer", "(?!muon$)", "sft.muon_learning_rate"),
    ("rft.optimizer", "(?!muon$)", "rft.muon_learning_rate"),
    ("judge.kind", "lexical", "judge.prompt", "judge.revision", "judge.temperature",
     "judge.max_tokens", "judge.form", "judge.structured_output", "judge.extra_body"),
    ("data.sft_path", "(?!builtin:synthetic$)", "data.synthetic_sft_rows"),
    ("data.rl_path", "(?!builtin:synthetic$)", "data.synthetic_rl_rows"),
)  # fmt: skip


def _why_dormant(field: str, config: RecipeConfig) -> str:
    """The reason that a field is without effect in a recipe; empty where it has one."""
    for by, values, *names in DORMANT:
        if field in names and re.match(values, str(found := get_field(config, by))):
            return f"has no effect: `{by}` is {found}"
    return ""


def _why_without_effect(field: str, plan: Plan, other: Plan) -> str:
    """The reason that two plans are the same though a field differs."""
    why = _why_dormant(field, plan.config) or _why_dormant(field, other.config)
    return why or "is read by no stage that trains or measures, or names the same content twice"


#: Of the reward these decide what a rubric's score is; the others, how scores make one number.
_RUBRICS = frozenset(
    f"reward.{name}"
    for name in ("rubric_source", "static_rubrics", "instance_rubrics_only", "rubric_aggregation")
)
#: Beside :data:`~refiner_core.contract.protocols.FIELDS`: what else decides which prompts a model
#: is measured on, as tokens.
_PROMPTS = frozenset(
    (
        *("data.held_out_fraction", "grpo.max_token_length"),
        *("model.tokenizer_name_or_path", "model.chat_template"),
    )
)
#: What decides how an agent's held-out episodes go, beside its user.
_OF_AGENTS = frozenset(
    f"environment.{name}"
    for name in (
        *("name", "domains", "test_split", "tasks", "max_turns", "repairs"),
        *("max_argument_bytes", "nl_assertions"),
    )
)


def _check_question(plan: SweepPlan, varied: Iterable[str]) -> list[str]:
    """Refuse a question that the trials cannot answer; return what is doubtful about it."""
    question, sweep = plan.sweep.question, plan.sweep.name
    if not any(s.kind == "evaluate" for s in plan.trials[0].plan.stages):
        if question.metric or question.model or question.protocol:
            raise ConfigurationError(
                f"Sweep {sweep} asks for {question.metric or 'a number'}, but its recipe evaluates "
                "nothing.",
                expected="`evaluate` among the recipe's `stages`",
                fix="add it: `overrides: ['stages=[data, …, evaluate]']`",
            )
        return ["The recipe evaluates nothing: arms can be compared by learning curves alone."]
    aim = aim_of(plan)
    protocol = _check_exists(plan, aim)
    if len(plan.arms) == 1:
        return []
    _check_yardstick(plan, aim, varied, protocol)
    _check_models(plan, aim)
    return _doubts(plan, aim)


# ---------------------------------------------------------------- the number exists


def _check_exists(plan: SweepPlan, aim: Question) -> ProtocolFile | None:
    """Refuse a number that nothing measures; its protocol, if it is not the recipe's own."""
    sweep, protocols = plan.sweep.name, protocols_of(plan.config)
    if not has_metric(plan.config, aim.metric):
        raise _unknown(sweep, "metric", aim.metric, metrics_of(plan.config))
    if aim.protocol and aim.protocol not in protocols:
        fix = f"name it for all trials: `overrides: ['evaluate.protocols=[{aim.protocol}]']`"
        raise _unknown(sweep, "protocol", aim.protocol, protocols, fix)
    protocol = protocols.get(aim.protocol) if aim.protocol else None
    measured = protocol.over(plan.config) if protocol else plan.config
    if aim.decoding not in measured.evaluate.decoding:
        raise _unknown(sweep, "decoding", aim.decoding, measured.evaluate.decoding)
    for trial in _first_trials(plan).values():
        if _evaluation(plan, trial, aim) is None:
            models = sorted({s.model for s in trial.stages if s.kind == "evaluate"})
            raise _unknown(sweep, "model", _model(plan, trial), models)
    return protocol


def _unknown(
    sweep: str, key: str, found: str, known: Iterable[str], fix: str = ""
) -> ConfigurationError:
    return ConfigurationError(
        f"`question: {key}` of sweep {sweep} is {found!r}, which its trials do not have."
        f"{suggest(found, known)}",
        expected=f"one of: {', '.join(known) or '(there are none)'}",
        fix=fix or f"correct `question: {key}`, or what is evaluated",
    )


# ---------------------------------------------------------------- one yardstick


def _check_yardstick(
    plan: SweepPlan, aim: Question, varied: Iterable[str], protocol: ProtocolFile | None
) -> None:
    fixed = set(protocol.fixed) if protocol is not None else set()
    if protocol is not None and "data" in protocol.sections:
        fixed.add("data.held_out_fraction")
    fields = [f for f in varied if measures(f, aim.metric, plan.config) and f not in fixed]
    if not fields:
        return
    free = f"protocol {protocol.name} leaves to the recipe" if protocol else "no protocol fixes"
    raise ConfigurationError(
        f"Arms of sweep {plan.sweep.name} differ in {', '.join(f'`{f}`' for f in fields)}, which "
        f"{free}, and which is part of how {aim.metric} is measured: each would be measured by a "
        "yardstick of its own, and the numbers could not be compared.",
        expected="one yardstick for all arms",
        fix="write it into the protocol's file"
        if protocol
        else "name a protocol file that fixes it, e.g. `overrides: ['evaluate.protocols="
        "[held-out-reader-v1]']` with `question: {protocol: held-out-reader-v1}`",
    )


def measures(field: str, metric: str, config: RecipeConfig) -> bool:
    """True if a field has a part in how a metric is measured, besides what is trained. Of an agent
    that is where it works, and with whom; how checks are weighed is part of what they are weighed
    for."""
    section = field.partition(".")[0]
    if field in _PROMPTS:
        return True
    if not config.environment.name:
        combined = section == "reward" and field not in _RUBRICS
        return field in FIELDS and (metric == "reward" or not combined)
    if field.startswith("environment.shaping.weights"):
        return weighed(metric)
    if field.startswith("environment.user."):
        return not config.evaluate.user.model
    if section in ("reward", "judge") and config.environment.nl_assertions != "judge":
        return False
    return field in FIELDS or field in _OF_AGENTS or field.startswith("evaluate.user.")


def _check_models(plan: SweepPlan, aim: Question) -> None:
    """An arm whose model and yardstick are the baseline's cannot differ from it."""
    by_arm, weights = _first_trials(plan), {}
    for arm, trial in by_arm.items():
        stage = _evaluation(plan, trial, aim)
        weights[arm] = stage.input_fingerprints.get("weights", "") if stage is not None else ""
    known = weights.pop(plan.baseline)
    if same := [arm for arm, found in weights.items() if found == known]:
        model = _model(plan, by_arm[plan.baseline])
        raise ConfigurationError(
            f"Arm {same[0]} of sweep {plan.sweep.name} has the same model {model} as the baseline "
            f"{plan.baseline}, and {aim.metric} is measured alike: they cannot differ.",
            expected="arms that train other models, measured by one yardstick",
            fix="vary what the model is trained with, or ask about another model; "
            "`refiner rescore` compares judges and rubrics on answers that are there",
        )


def _doubts(plan: SweepPlan, aim: Question) -> list[str]:
    warnings = []
    if not plan.sweep.question.metric:
        warnings.append(
            f"No `question: metric` is named: arms are compared on {aim.metric} first, and what is "
            "chosen after the fact is no test."
        )
    truth = aim.metric in ("oracle", "oracle_given_valid", "fact_recall", "truth_citation_f1")
    stages = plan.trials[0].plan.stages
    if truth and not any(s.sources.get("data.rl", "").startswith("synthetic:") for s in stages):
        warnings.append(
            f"{aim.metric} is measured on rows that carry their truth; no such rows, no number."
        )
    return warnings


# ---------------------------------------------------------------- parts


def _first_trials(plan: SweepPlan) -> dict[str, Plan]:
    """Of each arm the trial with the first seed."""
    return {t.arm: t.plan for t in plan.trials if t.seed == plan.sweep.seeds[0]}


def _model(plan: SweepPlan, trial: Plan) -> str:
    return plan.sweep.question.model or final_model(trial.config)


def _evaluation(plan: SweepPlan, trial: Plan, aim: Question) -> PlannedStage | None:
    return trial.evaluation(_model(plan, trial), aim.protocol)


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
    fixed, varied = {text.partition("=")[0] for text in sweep.overrides}, varied_fields(sweep)
    for field, key in varied.items():
        info, why = field_info(field, f"`{key}` of sweep {sweep.name}"), ""
        if field in fixed and not key.startswith("arms"):
            raise ConfigurationError(
                f"`{field}` is varied by `{key}` of sweep {sweep.name}, and set for all trials.",
                expected="one of the two",
                fix=f"drop `{field}` from the overrides",
            )
        if info.mark == "execution" and field not in _COMPUTES:
            why = "changes where or how something runs, never what is computed"
        elif field in _FOR_ALL:
            why = "says what is measured: arms that are not measured alike cannot be compared"
        if why:
            raise ConfigurationError(
                f"`{key}` of sweep {sweep.name} varies `{field}`, which {why}.",
                expected="fields that change what is computed, and the same evaluations",
                fix=f"set it for all trials: `overrides: [{field}=…]`",
            )
    if "seed" in {*fixed, *varied}:
        raise ConfigurationError(
            f"`seed` is set or varied by sweep {sweep.name}.",
            expected="run seeds in `seeds`: every arm is tried with each",
            fix="write `seeds: [1, 2, 3]` into its file",
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
    varied = varied_fields(plan.sweep)
    _check_seeds(plan.sweep, by_arm)
    _check_arms(plan, by_arm, varied, plan_as)
    _check_publications(plan.sweep, by_arm)
    warnings = _check_question(plan, varied)
    if len(plan.arms) == 1:
        warnings.append("The sweep has one arm: its seeds show a spread, but nothing is compared.")
    return tuple(warnings)


def _measured_stages(plan: Plan) -> frozenset[str]:
    """Ids of the stages that make or measure a model: what a trial *is*."""
    return frozenset(s.id for s in plan.stages if s.kind in MEASURED)


# ---------------------------------------------------------------- seeds


def _check_seeds(sweep: SweepFile, plans: Plans) -> None:
    if len(sweep.seeds) == 1:
        return
    for arm, by_seed in plans.items():
        config = by_seed[0].config
        trains, fix = {*TRAINED} & {*config.stages}, "write `seeds: [1]`"
        why = f"none of its stages ({', '.join(config.stages)}) is trained with a seed"
        deaf = trains == {"command"} and not config.command.adopted
        deaf = deaf and not uses(config.command, "seed")
        if deaf:  # a recipe's only trainer, which never hears of the seed
            why, fix = "`command.run` does not name {seed}", "write {seed} into `command.run`"
        elif _measured_stages(by_seed[0]) != _measured_stages(by_seed[1]):
            continue
        raise ConfigurationError(
            f"The seeds {', '.join(map(str, sweep.seeds))} of sweep {sweep.name} do not reach arm "
            f"{arm}: {why}, so that its trials would all be the same.",
            expected="seeds that change what is trained, or one seed",
            fix=fix,
        )


# ---------------------------------------------------------------- arms


def _check_arms(
    plan: SweepPlan,
    by_arm: Plans,
    varied: Iterable[str],
    plan_as: Callable[[RecipeConfig], Plan],
) -> None:
    """Every arm is another thing than every other one, with fields that nothing reads at one and
    the same value."""
    known: dict[frozenset[str], str] = {}
    for arm in (plan.baseline, *(arm for arm in by_arm if arm != plan.baseline)):
        found = by_arm[arm][0]
        idle = {f: field_info(f).default for f in varied if _why_dormant(f, found.config)}
        awake = plan_as(replace_fields(found.config, idle)) if idle else found
        other = known.setdefault(_measured_stages(awake), arm)
        if other != arm:
            raise _same(plan, arm, other, found, by_arm[other][0], varied)


def _same(
    plan: SweepPlan, arm: str, other: str, found: Plan, known: Plan, varied: Iterable[str]
) -> ConfigurationError:
    """A refusal of two arms that would be one, saying why what they differ in has no effect."""
    sweep = plan.sweep
    differ = [f for f in varied if get_field(found.config, f) != get_field(known.config, f)]
    whys = [f"`{f}` {_why_without_effect(f, found, known)}" for f in differ]
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
    taken: dict[tuple[str | None, ...], tuple[str, str]] = {}
    for arm, by_seed in plans.items():
        publish = by_seed[0].config.publish
        if "publish" not in by_seed[0].config.stages or "{fingerprint}" in publish.repo_id:
            continue
        for seed, plan in zip(sweep.seeds, by_seed, strict=True):
            last = (p for p in plan.stages if p.name in ("publish", "publish-best") and p.inputs)
            if (stage := next(last, None)) is None:
                continue
            repository = publish.repo_id.replace("{seed}", str(seed))
            mine = stage.input_fingerprints["weights"], f"{arm}/seed{seed}"
            before = taken.setdefault((publish.target, publish.path, repository), mine)
            if before[0] != mine[0]:
                raise ConfigurationError(
                    f"Trials {before[1]} and {mine[1]} of sweep {sweep.name} would be published to "
                    f"one repository, {repository!r}.",
                    expected="a repository for each model",
                    fix="write {fingerprint} (and {seed}) into publish.repo_id, or leave `publish` "
                    "out of `stages`",
                )
