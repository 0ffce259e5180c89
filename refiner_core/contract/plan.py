"""The plan: a recipe's stages as values, with fingerprints. Planning changes nothing.

``make_plan(config, sources)`` is pure: ``sources`` maps names of outside inputs (``data.sft``,
``data.rl``, ``model``, ``tokenizer``, ``rubrics``, ``judge_prompt``) to digests that the caller has
computed; those of a protocol file end in its name (``rubrics@held-out-v1``). The graph follows from
the recipe's stage list:

    data ─┬─> sft ──> rft ──> grpo ──> command ──> publish ─┐
          │    │  │    ^ │      │         │                 ├─> card
          │    │  └> sample     │         │                 │
          └────┴─────────┴──────┴─────────┴──> evaluate ────┘ (one per model: base, sft, rft, …)

``rft`` is fine-tuning on the attempts at the training prompts that ``sample`` kept.

Each model is evaluated under the recipe's own protocol and under each of ``evaluate.protocols``
(``evaluate-sft@held-out-v1``), on the recipe's held-out prompts or on the protocol's own set
(``data@held-out-v1``). Protocols with the same measurement share one stage, under the first name.

Publications before the end of training are added last (:func:`add_publications`).

``command`` is another trainer; it reads `data` or an earlier model only if its texts name
``{data}`` or ``{model}``. Sources on a Hub are fetched first, by ``fetch``, which needs the
network: the stages that read them come *after* that stage without having it as an input, so that
the place of a model changes no fingerprint. The same holds for stages that use a judge whose server
refiner starts: ``judge``, of kind ``serve``, answers before they begin; see
:mod:`refiner_core.contract.services`.

Several stages may share a *kind* (``evaluate``); each has a *name* of its own (``evaluate-sft``).
``card`` follows ``publish`` and the evaluations and writes the numbers into the published card, so
that publishing never waits for an evaluation and an evaluation never blocks publishing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from refiner_core.contract.config import RecipeConfig, uses
from refiner_core.contract.errors import no_such
from refiner_core.contract.fields import refuse_fields
from refiner_core.contract.kinds import KINDS, TRAINED, TRAINED_HERE
from refiner_core.contract.plan_builder import PlanBuilder, stage_values
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.protocols import all_under, configs_under, without_protocol


def final_model(config: RecipeConfig) -> str:
    """The last model that a recipe makes: ``sft``, ``grpo``, ``command``; ``base`` for none."""
    made = [m for m in TRAINED if m in config.stages]
    return made[-1] if made else "base"


def published_steps(config: RecipeConfig) -> tuple[int, ...]:
    """Steps of the final model that are exported before its training ends, ascending.

    Raises
    ------
    ConfigurationError
        They are unknown before the run, or there are none.
    """
    publish, model = config.publish, final_model(config)
    refuse = functools.partial(refuse_fields, config)
    if "publish" not in config.stages or publish.which == "final":
        return ()
    refuse(
        model not in TRAINED_HERE or (publish.which != "listed" and model != "grpo"),
        "publish.which stages",
        f"`final` if the last model (`{model}`) is another trainer's, whose steps only "
        "it can export; or `listed` if its number of steps depends on its data",
        "set publish.which=final, or publish.which=listed publish.steps=[…]; `refiner adopt` "
        "publishes a step of a run that has ended",
    )
    save_freq, last = getattr(config, model).save_freq, config.grpo.num_training_steps
    if publish.which != "listed":
        return tuple(range(save_freq, last, save_freq))
    most = last if model == "grpo" else math.inf
    can_be = [s for s in publish.steps if s == most or (0 < s < most and s % save_freq == 0)]
    instead = {*can_be}
    if not can_be or max(publish.steps) > most:
        instead.add(last if model == "grpo" else save_freq)
    refuse(
        not publish.steps or len(set(can_be)) != len(publish.steps),
        f"publish.which publish.steps {model}.save_freq",
        f"steps up to {most:g} at which {model} saves (multiples of {model}.save_freq), each once",
        f"add publish.steps=[{','.join(map(str, sorted(instead)))}], or other such steps",
    )
    return tuple(sorted(s for s in can_be if s != most))


def publishes_final(config: RecipeConfig) -> bool:
    """Tell whether the last checkpoint is published as such."""
    publish = config.publish
    if "publish" not in config.stages or publish.which == "best":
        return False
    grpo = final_model(config) == "grpo"
    listed = grpo and config.grpo.num_training_steps in publish.steps
    return publish.which != "listed" or listed


def add_publications(builder: PlanBuilder, stage: str, roles: dict[str, str]) -> None:
    """Add the stages that publish the model of training stage ``stage``. For the last checkpoint:

        grpo ──> publish ─┬─> card
              └> evaluate ┘

    For each step before it (:func:`published_steps`), while training continues:

        grpo @ step 50 ──> export-step50 ──┬─> publish-step50 ──────┬─> card-step50
                                           └─> evaluate-grpo-step50 ┘

    ``export`` waits for the *checkpoint* of that step, not for the end of training. ``evaluate``
    stands for one stage per protocol: every published step is measured under all of them, for its
    card. ``card-progression`` writes the steps' numbers into the last card, once all are there.
    With ``publish.which=best`` every saved step is exported and evaluated, and one ``publish-best``
    has them all as inputs (``weights-step50``, ``evaluation-step50``, …, ``weights``).

    ``roles`` maps ``evaluation-sft`` (``evaluation-sft@PROTOCOL``) to the names of the existing
    `evaluate` stages.
    """
    config, model = builder.config, final_model(builder.config)
    measured = config.publish.evaluate and "evaluate" in config.stages
    exports = {
        s: builder.add(
            f"export-step{s}", "export", {"policy": stage}, model=model, at_step={"policy": s}
        )
        for s in published_steps(config)
    }
    numbers = {
        s: builder.add_evaluations(f"{model}-step{s}", exported)
        for s, exported in exports.items()
        if measured
    }
    if config.publish.which == "best":
        _add_best(builder, stage, exports, numbers, roles)
        return
    others = {r: n for r, n in roles.items() if without_protocol(r) != f"evaluation-{model}"}
    for step, exported in exports.items():
        name = builder.add(f"publish-step{step}", "publish", {"weights": exported}, model=model)
        if step in numbers:
            inputs = {"publish": name, **numbers[step], **others}
            builder.add(f"card-step{step}", "card", inputs, model=model)
    if publishes_final(config):
        data = {"data": "data"} if "data" in builder.stages[stage].inputs else {}
        builder.add("publish", "publish", {"weights": stage, **data}, model=model)
        if roles:
            builder.add("card", "card", {"publish": "publish", **roles}, model=model)
        if numbers:  # a stage of its own: a failed step must not keep the numbers off the card
            steps = {role: name for of_step in numbers.values() for role, name in of_step.items()}
            inputs = {"publish": "publish", **roles, **steps}
            after = ("card",) if roles else ()
            builder.add("card-progression", "card", inputs, model=model, after=after)


def _add_best(
    builder: PlanBuilder,
    stage: str,
    exports: dict[int, str],
    numbers: dict[int, dict[str, str]],
    roles: dict[str, str],
) -> None:
    model = final_model(builder.config)
    refuse_fields(
        builder.config,
        f"evaluation-{model}" not in roles or len(numbers) != len(exports),
        "publish.which publish.evaluate evaluate.models stages",
        f"`evaluate` in `stages`, {model} in evaluate.models, publish.evaluate=true",
        "set these, or another publish.which",
    )
    inputs = {"weights": stage, "data": "data", **roles}
    inputs |= {f"weights-step{s}": name for s, name in exports.items()}
    for of_step in numbers.values():
        inputs |= of_step
    builder.add("publish-best", "publish", inputs, model=model)


@dataclass(frozen=True)
class Plan:
    """All stages of a recipe, inputs first.

    ``given`` are the stages outside of a call with ``only``: it reads their outputs, and never
    starts them. ``by_name`` includes them.
    """

    recipe: str
    config: RecipeConfig
    stages: tuple[PlannedStage, ...]
    given: tuple[PlannedStage, ...] = ()
    by_name: Mapping[str, PlannedStage] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {s.name: s for s in (*self.given, *self.stages)}
        object.__setattr__(self, "by_name", by_name)

    def config_of(self, stage: PlannedStage) -> RecipeConfig:
        """The configuration of a stage: under its protocol, if it has one."""
        return self._under[stage.protocol] if stage.protocol else self.config

    @functools.cached_property
    def _under(self) -> dict[str, RecipeConfig]:
        return all_under(self.config)

    def evaluation(self, model: str, protocol: str = "") -> PlannedStage | None:
        """The stage that measures a model under a protocol file, or under the recipe's own without
        one. Protocols with the same measurement share a stage. None: there is none."""
        found = [s for s in self.stages if s.kind == "evaluate" and s.model == model]
        own = [s for s in found if s.protocol == protocol]
        if own or protocol not in configs_under(self.config):
            return next(iter(own), None)
        wanted = _measuring(self._under[protocol])
        return next((s for s in found if _measuring(self.config_of(s)) == wanted), None)

    def find(self, name_or_kind: str) -> list[PlannedStage]:
        """Stages of that name, else of that kind.

        Raises
        ------
        ConfigurationError
            There is none; the message lists the existing ones.
        """
        hits = [s for s in self.stages if s.name == name_or_kind]
        hits = hits or [s for s in self.stages if s.kind == name_or_kind]
        if not hits:
            names = [s.name for s in self.stages]
            fix = "name one of these, or add the stage to `stages:` in the recipe"
            raise no_such(f"The plan of {self.recipe} has no stage", name_or_kind, names, fix)
        return hits


def _measuring(config: RecipeConfig) -> dict[str, Any]:
    """The values that determine what an evaluation measures."""
    return stage_values(config, {}, (*KINDS["evaluate"].fields, "data"), False)


def make_plan(
    config: RecipeConfig,
    sources: Mapping[str, str],
    memo: dict[Hashable, PlannedStage] | None = None,
) -> Plan:
    """The plan of a recipe. Pure: reads nothing but its arguments.

    ``memo``: a dictionary, initially empty, shared by all plans of one sweep with their stages.
    """
    _check_stage_list(config)
    builder = PlanBuilder(config, sources, {} if memo is None else memo)
    if "data" in config.stages:
        builder.add("data", "data", {})
    models = _add_training(builder)
    final = next(reversed(models))
    roles: dict[str, str] = {}
    if "evaluate" in config.stages:
        refuse_fields(
            config,
            config.evaluate.models and not {*config.evaluate.models}.intersection(models),
            "evaluate.models stages",
            f"some of: {', '.join(models)}, because nothing would be evaluated",
            "correct evaluate.models, or add the stage to `stages`",
        )
        for model in (m for m in config.evaluate.models if m in models):
            roles |= builder.add_evaluations(model, models[model])
    if "publish" in config.stages:
        add_publications(builder, models[final], roles)
    return _only(config, builder.all_stages())


def _only(config: RecipeConfig, stages: tuple[PlannedStage, ...]) -> Plan:
    refuse_fields(
        config,
        not {*config.only} <= {s.name for s in stages},
        "only",
        f"some of: {', '.join(s.name for s in stages)}",
        "correct `only`, or drop it for all of them",
    )
    if not config.only:
        return Plan(config.recipe, config, stages)
    servers = {s.name for s in stages if s.kind == "serve"}
    needed = {n for s in stages if s.name in config.only for n in s.after if n in servers}
    names = needed.union(config.only)
    wanted = tuple(s for s in stages if s.name in names)
    given = tuple(s for s in stages if s.name not in names)
    return Plan(config.recipe, config, wanted, given)


def _add_training(builder: PlanBuilder) -> dict[str, str]:
    """The chain of training stages: model name -> stage name (empty for the base)."""
    config = builder.config
    models: dict[str, str] = {"base": ""}
    for name in TRAINED:
        if name not in config.stages:
            continue
        kind, newest = KINDS[name], next(reversed(models.values()))
        inputs = kind.inputs(config, newest)
        if KINDS[kind.learns_from].entry == name:  # added with the training
            inputs["data"] = builder.add(kind.learns_from, kind.learns_from, inputs)
        models[name] = builder.add(name, name, inputs, model=name)
    return models


def _check_stage_list(config: RecipeConfig) -> None:
    stages, refuse = config.stages, functools.partial(refuse_fields, config)
    trained = [KINDS[name] for name in TRAINED if name in stages]
    reads_data = any("data" in kind.inputs(config, "") for kind in trained)
    refuse(
        not 0 < len(stages) == len({*stages}),
        "stages",
        "each stage at most once, and at least one",
        "correct `stages:`",
    )
    refuse(
        "data" not in stages and (reads_data or "evaluate" in stages or not trained),
        "stages",
        "`data` first: every other stage reads its output (a `command` does if it names {data})",
        "add `data` to `stages:` (it is skipped if its outputs exist)",
    )
    refuse(
        "publish" in stages and not trained,
        "stages",
        f"{', '.join(f'`{name}`' for name in TRAINED[:-1])} or `{TRAINED[-1]}` beside `publish`",
        "add a training stage to `stages:`, or drop `publish`",
    )
    refuse(
        "command" in stages and {*TRAINED_HERE} & {*stages} and not uses(config.command, "model"),
        "stages command.run",
        "a command that starts from the recipe's trained model, by {model}",
        "write {model} into `command.run`, or drop the other training stages",
    )
