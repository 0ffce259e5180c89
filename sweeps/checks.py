"""Errors in a sweep, found before anything is launched.

In: a sweep with its arms and the plans of all its trials. Out: nothing, or warnings about doubtful
settings; impossible ones are refused, with the field, arm or seed and the fix.

Metrics under different protocols are never compared, so an arm that changes how it is measured (the
judge, the rubrics, the length of answers) has to be measured under a fixed protocol file. How
judgements are combined into one reward affects the metric `reward` alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from refiner_core.contract.config import RecipeConfig, uses
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import field_info, suggest
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.placement import STAGES
from refiner_core.contract.plan import Plan, final_model
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.protocols import FIELDS, ProtocolFile, protocols_of
from refiner_core.evaluation.metrics import has_metric, metrics_of, weighed
from sweeps.power import aim_of
from sweeps.values import Question, SweepFile, SweepPlan

#: Fields that nothing reads: the deciding field, its value (as text) for that, and the fields.
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
    ("reward.penalties.long_spans", r"0(\.0)?$", "reward.penalties.long_span_words"),
    ("reward.penalties.length", r"0(\.0)?$", "reward.penalties.length_words"),
    ("sft.optimizer", "(?!muon$)", "sft.muon_learning_rate"),
    ("rft.optimizer", "(?!muon$)", "rft.muon_learning_rate"),
    ("judge.kind", "lexical", "judge.prompt", "judge.revision", "judge.temperature",
     "judge.max_tokens", "judge.form", "judge.structured_output", "judge.extra_body"),
    ("data.sft_path", "(?!builtin:synthetic$)", "data.synthetic_sft_rows"),
    ("data.rl_path", "(?!builtin:synthetic$)", "data.synthetic_rl_rows"),
)  # fmt: skip


def _why_inactive(field: str, config: RecipeConfig) -> str:
    """Reason why a field has no effect in a recipe; empty if it has one."""
    for by, values, *names in DORMANT:
        if field in names and re.match(values, str(found := get_field(config, by))):
            return f"has no effect: `{by}` is {found}"
    return ""


#: Fields of the reward that decide a rubric's score; the others decide how scores are combined.
_RUBRICS = frozenset(
    f"reward.{name}"
    for name in ("rubric_source", "static_rubrics", "instance_rubrics_only", "rubric_aggregation")
)
#: Fields beside :data:`~refiner_core.contract.protocols.FIELDS` that decide which prompts a model
#: is measured on, as tokens.
_PROMPTS = frozenset(
    (
        *("data.held_out_fraction", "grpo.max_token_length"),
        *("model.tokenizer_name_or_path", "model.chat_template"),
    )
)
#: Fields that decide an agent's held-out episodes, beside its user.
_OF_AGENTS = frozenset(
    f"environment.{name}"
    for name in (
        *("name", "domains", "test_split", "tasks", "max_turns", "repairs"),
        *("max_argument_bytes", "nl_assertions"),
    )
)


def _check_question(plan: SweepPlan, varied: Iterable[str]) -> list[str]:
    """Refuse a question that the trials cannot answer; return warnings about it."""
    question, sweep = plan.sweep.question, plan.sweep.name
    if not any(s.kind == "evaluate" for s in plan.trials[0].plan.stages):
        if question.metric or question.model or question.protocol:
            raise ConfigurationError(
                f"Sweep {sweep} asks for {question.metric or 'a metric'}, but its recipe evaluates "
                "nothing.",
                expected="`evaluate` among the recipe's `stages`",
                fix="add it: `overrides: ['stages=[data, …, evaluate]']`",
            )
        return ["The recipe evaluates nothing: arms can only be compared by learning curves."]
    aim = aim_of(plan)
    protocol = _check_exists(plan, aim)
    if len(plan.arms) == 1:
        return []
    _check_yardstick(plan, aim, varied, protocol)
    _check_models(plan, aim)
    if question.metric:
        return []
    return [
        f"No `question: metric` is named: arms are compared on {aim.metric} first, and a metric "
        "chosen after the fact is no test."
    ]


# ---------------------------------------------------------------- existence of the metric


def _check_exists(plan: SweepPlan, aim: Question) -> ProtocolFile | None:
    """Refuse a metric that nothing measures; returns its protocol, unless it is the recipe's
    own."""
    protocols = protocols_of(plan.config)
    protocol = protocols.get(aim.protocol)
    decodings = (protocol.over(plan.config) if protocol else plan.config).evaluate.decoding
    trials = [t for t in _first_trials(plan).values() if _evaluation(plan, t, aim) is None]
    model = _model(plan, (trials or [plan.trials[0].plan])[0])
    models = sorted({s.model for t in trials[:1] for s in t.stages if s.kind == "evaluate"})
    for key, found, there, known in (
        ("metric", aim.metric, has_metric(plan.config, aim.metric), metrics_of(plan.config)),
        ("protocol", aim.protocol, not aim.protocol or protocol is not None, protocols),
        ("decoding", aim.decoding, aim.decoding in decodings, decodings),
        ("model", model, not trials, models),
    ):
        if not there:
            fix = f"correct `question: {key}`, or what is evaluated"
            if key == "protocol":
                fix = f"name it for all trials: `overrides: ['evaluate.protocols=[{found}]']`"
            raise ConfigurationError(
                f"`question: {key}` of sweep {plan.sweep.name} is {found!r}, which its trials do "
                f"not have.{suggest(found, known)}",
                expected=f"one of: {', '.join(known) or '(there are none)'}",
                fix=fix,
            )
    return protocol


# ---------------------------------------------------------------- the same measurement


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
        f"{free}, and which is part of how {aim.metric} is measured: each would be measured "
        "differently, and the values could not be compared.",
        expected="the same measurement for all arms",
        fix="write it into the protocol's file"
        if protocol
        else "name a protocol file that fixes it, e.g. `overrides: ['evaluate.protocols="
        "[held-out-reader-v1]']` with `question: {protocol: held-out-reader-v1}`",
    )


def measures(field: str, metric: str, config: RecipeConfig) -> bool:
    """True if a field affects how a metric is measured, besides the training. For an agent these
    are its environment and its user; weights of checks only affect the metrics that use them."""
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
    """Refuse arms with the same model and measurement as the baseline: they cannot differ."""
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
            expected="arms that train other models, measured in the same way",
            fix="vary what the model is trained with, or ask about another model; "
            "`refiner rescore` compares judges and rubrics on existing answers",
        )


# ---------------------------------------------------------------- parts


def _first_trials(plan: SweepPlan) -> dict[str, Plan]:
    """The trial of each arm with the first seed."""
    return {t.arm: t.plan for t in plan.trials if t.seed == plan.sweep.seeds[0]}


def _model(plan: SweepPlan, trial: Plan) -> str:
    return plan.sweep.question.model or final_model(trial.config)


def _evaluation(plan: SweepPlan, trial: Plan, aim: Question) -> PlannedStage | None:
    return trial.evaluation(_model(plan, trial), aim.protocol)


Plans = Mapping[str, Sequence[Plan]]
#: Kinds of stages that make or measure a model.
MEASURED = frozenset(("data", *STAGES, "sample", "command", "evaluate"))
#: Execution fields by their mark, but results depend on them.
_COMPUTES = frozenset(("stages",))
#: Fields that select the evaluations; all arms have the same.
_FOR_ALL = ("evaluate.protocols", "evaluate.models")


def varied_fields(sweep: SweepFile) -> dict[str, str]:
    """Every field that may differ between arms, and the file's key that varies it."""
    found = dict.fromkeys(sweep.factors, "factors")
    found |= dict.fromkeys(chain.from_iterable(sweep.zipped), "zip")
    found |= {field: f"arms: {arm}" for arm, values in sweep.arms.items() for field in values}
    return found


def check_fields(sweep: SweepFile, base: RecipeConfig) -> None:
    """Refuse fields that a sweep cannot vary.

    Raises
    ------
    ConfigurationError
        A field that changes no result, or one that the sweep itself sets.
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
            why = "selects the measurement: arms that are not measured alike cannot be compared"
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


def check_trials(plan: SweepPlan, by_arm: Plans) -> tuple[str, ...]:
    """Refuse trials without information; return warnings about doubtful ones.

    Parameters
    ----------
    by_arm
        The plans of each arm, seed by seed.

    Raises
    ------
    ConfigurationError
        Equal arms, seeds that reach no training, one repository for two models, a question that the
        recipe cannot answer.
    """
    varied = varied_fields(plan.sweep)
    _check_seeds(plan.sweep, by_arm)
    _check_arms(plan, by_arm, varied)
    _check_publications(plan)
    warnings = _check_question(plan, varied)
    if len(plan.arms) == 1:
        warnings.append("The sweep has one arm: its seeds show a spread, but nothing is compared.")
    return tuple(warnings)


def _measured_stages(plan: Plan) -> frozenset[str]:
    """Ids of the stages that make or measure a model: the identity of a trial."""
    return frozenset(s.id for s in plan.stages if s.kind in MEASURED)


def _check_seeds(sweep: SweepFile, plans: Plans) -> None:
    """Check that every arm trains with the seed."""
    for arm, by_seed in plans.items():
        config = by_seed[0].config
        fix = "write `seeds: [1]`"
        why = f"none of its stages ({', '.join(config.stages)}) is trained with a seed"
        deaf = {*TRAINED} & {*config.stages} == {"command"} and not config.command.adopted
        if deaf and not uses(config.command, "seed"):
            why, fix = "`command.run` does not name {seed}", "write {seed} into `command.run`"
        elif len({_measured_stages(plan) for plan in by_seed[:2]}) > 1:
            continue
        if len(by_seed) > 1:
            raise ConfigurationError(
                f"The seeds {', '.join(map(str, sweep.seeds))} of sweep {sweep.name} do not reach "
                f"arm {arm}: {why}, so that its trials would all be the same.",
                expected="seeds that change what is trained, or one seed",
                fix=fix,
            )


def _check_arms(plan: SweepPlan, by_arm: Plans, varied: Iterable[str]) -> None:
    """Check that arms differ in more than fields that nothing reads."""
    known: dict[object, str] = {}
    for arm in (plan.baseline, *(arm for arm in by_arm if arm != plan.baseline)):
        found, config = by_arm[arm][0], by_arm[arm][0].config
        read = tuple(f for f in varied if not _why_inactive(f, config))
        values = tuple((f, repr(get_field(config, f))) for f in read)
        for key in (values, _measured_stages(found)):
            if (other := known.setdefault(key, arm)) != arm:
                raise _same(plan, arm, other, config, by_arm[other][0].config, varied)


def _same(
    plan: SweepPlan,
    arm: str,
    other: str,
    config: RecipeConfig,
    known: RecipeConfig,
    varied: Iterable[str],
) -> ConfigurationError:
    """Refusal of two equal arms, with the reason why their differences have no effect."""
    idle = "is read by no stage that trains or measures, or has names for the same content"
    differ = [f for f in varied if get_field(config, f) != get_field(known, f)]
    whys = [f"`{f}` {_why_inactive(f, config) or _why_inactive(f, known) or idle}" for f in differ]
    because = "; ".join(whys) or "they set the same fields to the same values"
    what = f"Arms {other} and {arm} of sweep {plan.sweep.name} are the same"
    if other == plan.baseline:
        what = f"Arm {arm} of sweep {plan.sweep.name} changes nothing against the baseline {other}"
    return ConfigurationError(
        f"{what}: every stage that trains or measures is the same one, because {because}.",
        expected="arms that differ in what is trained or measured",
        fix=f"drop {arm} (see `exclude`), or change what keeps its fields from having an effect",
    )


def _check_publications(plan: SweepPlan) -> None:
    """Refuse to publish two models to one repository."""
    taken: dict[object, tuple[str, str]] = {}
    for trial in plan.trials:
        to, stages = trial.plan.config.publish, trial.plan.stages
        sent = (s for s in stages if s.name in ("publish", "publish-best") and s.inputs)
        stage = next(sent, None)
        if stage is None or "{fingerprint}" in to.repo_id:
            continue
        mine = stage.input_fingerprints["weights"], trial.name
        repository = to.repo_id.replace("{seed}", str(trial.seed))
        before = taken.setdefault((to.target, to.path, repository), mine)
        if before[0] != mine[0]:
            raise ConfigurationError(
                f"Trials {before[1]} and {mine[1]} of sweep {plan.sweep.name} would be published "
                f"to one repository, {repository!r}.",
                expected="a repository for each model",
                fix="write {fingerprint} (and {seed}) into publish.repo_id, or leave `publish` "
                "out of `stages`",
            )
