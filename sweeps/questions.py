"""Whether a sweep can answer its question: the number exists, and all arms measure it alike.

In: a planned sweep. Out: warnings, or a refusal that says what would make the number comparable.
Numbers of different protocols are never compared, so an arm that changes its own yardstick (the
judge, the rubrics, how long an answer may be) has to be measured by one that it does not change: a
protocol file. How judgements become one reward is part of the metric `reward` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.plan import Plan, PlannedStage
from refiner_core.contract.protocols import FIELDS, ProtocolFile, protocols_of
from refiner_core.contract.publications import final_model
from refiner_core.evaluation.metrics import has_metric, metrics_of, weighed
from sweeps.power import Aim, aim_of
from sweeps.values import Question, SweepPlan

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


def check_question(plan: SweepPlan, varied: Iterable[str]) -> list[str]:
    """Refuse a question that the trials cannot answer; return what is doubtful about it.

    Parameters
    ----------
    varied
        Fields that arms differ in.

    Raises
    ------
    ConfigurationError
        The number does not exist, or arms would be measured by different yardsticks.
    """
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
    _check_exists(plan, question, aim)
    if len(plan.arms) == 1:
        return []
    _check_yardstick(plan, aim, list(varied))
    _check_models(plan, aim)
    return _doubts(plan, question, aim)


# ---------------------------------------------------------------- the number exists


def _check_exists(plan: SweepPlan, question: Question, aim: Aim) -> None:
    sweep = plan.sweep.name
    if not has_metric(_config(plan), aim.metric):
        raise _unknown(sweep, "metric", aim.metric, metrics_of(_config(plan)))
    protocols = protocols_of(_config(plan))
    if aim.protocol and aim.protocol not in protocols:
        name = aim.protocol
        raise ConfigurationError(
            f"`question: protocol` of sweep {sweep} is {name!r}, under which no arm is measured."
            f"{suggest(name, protocols)}",
            expected=f"one of: {', '.join(protocols)}" if protocols else "a protocol of the recipe",
            fix=f"name it for all trials: `overrides: ['evaluate.protocols=[{name}]']`",
        )
    measured = _under(_config(plan), aim.protocol)
    if aim.decoding not in measured.evaluate.decoding:
        raise _unknown(sweep, "decoding", aim.decoding, measured.evaluate.decoding)
    for trial in _first_seed(plan):
        found = _evaluation(trial, _model(trial, question), aim)
        if found is None:
            models = sorted({s.model for s in trial.stages if s.kind == "evaluate"})
            raise _unknown(sweep, "model", _model(trial, question), models)


def _unknown(sweep: str, key: str, found: str, known: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(
        f"`question: {key}` of sweep {sweep} is {found!r}, which its trials do not have."
        f"{suggest(found, known)}",
        expected=f"one of: {', '.join(known)}",
        fix=f"correct `question: {key}`, or what is evaluated",
    )


# ---------------------------------------------------------------- one yardstick


def _check_yardstick(plan: SweepPlan, aim: Aim, varied: Sequence[str]) -> None:
    protocol = protocols_of(_config(plan)).get(aim.protocol) if aim.protocol else None
    config = _config(plan)
    fields = [f for f in varied if measures(f, aim.metric, config) and not _is_fixed(f, protocol)]
    if not fields:
        return
    named = ", ".join(f"`{f}`" for f in fields)
    if protocol is not None:
        raise ConfigurationError(
            f"Arms of sweep {plan.sweep.name} differ in {named}, which protocol {protocol.name} "
            f"leaves to the recipe, and which is part of how {aim.metric} is measured.",
            expected="one yardstick for all arms",
            fix="write it into the protocol's file",
        )
    raise ConfigurationError(
        f"Arms of sweep {plan.sweep.name} differ in {named}, which is part of how {aim.metric} is "
        "measured: each would be measured by a yardstick of its own, and the numbers could not be "
        "compared.",
        expected="one yardstick for all arms",
        fix="name a protocol file that fixes it, e.g. `overrides: ['evaluate.protocols="
        "[held-out-reader-v1]']` with `question: {protocol: held-out-reader-v1}`",
    )


def measures(field: str, metric: str, config: RecipeConfig) -> bool:
    """Whether a field has a part in how a metric is measured, besides what is trained."""
    if field in _PROMPTS:
        return True
    if config.environment.name:
        return _measures_agents(field, metric, config)
    if field not in FIELDS:
        return False
    combined = field.startswith("reward.") and field not in _RUBRICS
    return metric == "reward" or not combined


def _measures_agents(field: str, metric: str, config: RecipeConfig) -> bool:
    """The same of an agent: where it works, and with whom; how checks are weighed is part of what
    they are weighed for."""
    section = field.partition(".")[0]
    if field.startswith("environment.shaping.weights"):
        return weighed(metric)
    if field.startswith("environment.user."):
        return not config.evaluate.user.model
    if section in ("reward", "judge") and config.environment.nl_assertions != "judge":
        return False
    return field in FIELDS or field in _OF_AGENTS or field.startswith("evaluate.user.")


def _is_fixed(field: str, protocol: ProtocolFile | None) -> bool:
    if protocol is None:
        return False
    return field in protocol.fixed or (
        field == "data.held_out_fraction" and "data" in protocol.sections
    )


def _check_models(plan: SweepPlan, aim: Aim) -> None:
    """An arm whose model and yardstick are the baseline's cannot differ from it."""
    by_arm = {t.arm: t.plan for t in plan.trials if t.seed == plan.sweep.seeds[0]}
    known = by_arm[plan.baseline]
    same = [
        arm
        for arm, found in by_arm.items()
        if arm != plan.baseline and _weights(plan, found, aim) == _weights(plan, known, aim)
    ]
    if same:
        model = _model(known, plan.sweep.question)
        raise ConfigurationError(
            f"Arm {same[0]} of sweep {plan.sweep.name} has the same model {model} as the baseline "
            f"{plan.baseline}, and {aim.metric} is measured alike: they cannot differ.",
            expected="arms that train other models, measured by one yardstick",
            fix="vary what the model is trained with, or ask about another model; "
            "`refiner rescore` compares judges and rubrics on answers that are there",
        )


def _weights(plan: SweepPlan, found: Plan, aim: Aim) -> str:
    stage = _evaluation(found, _model(found, plan.sweep.question), aim)
    return stage.input_fingerprints.get("weights", "") if stage is not None else ""


def _doubts(plan: SweepPlan, question: Question, aim: Aim) -> list[str]:
    warnings = []
    if len(plan.sweep.seeds) == 1:
        warnings.append(
            "One seed: how much a number changes from seed to seed stays unknown, and an arm may "
            "win by chance. Three or more are meant to be compared."
        )
    if not question.metric:
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
    names = {t.plan.config.model.name_or_path for t in plan.trials}
    if len(names) > 1:
        warnings.append(
            "Arms start from different models: where their tokenizers differ, so do their prompts, "
            "and they will not be compared."
        )
    return warnings


# ---------------------------------------------------------------- parts


def _config(plan: SweepPlan) -> RecipeConfig:
    return plan.trials[0].plan.config


def _under(config: RecipeConfig, protocol: str) -> RecipeConfig:
    return protocols_of(config)[protocol].over(config) if protocol else config


def _first_seed(plan: SweepPlan) -> list[Plan]:
    return [t.plan for t in plan.trials if t.seed == plan.sweep.seeds[0]]


def _model(plan: Plan, question: Question) -> str:
    return question.model or final_model(plan.config)


def _evaluation(plan: Plan, model: str, aim: Aim) -> PlannedStage | None:
    """The evaluation of a model that the number is of; where a protocol measures as the recipe
    does, there is one stage for both."""
    found = [s for s in plan.stages if s.kind == "evaluate" and s.model == model]
    exact = [s for s in found if s.protocol == aim.protocol]
    return next(iter(exact or found), None)
