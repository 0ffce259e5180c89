"""The plan: a recipe's stages as values, with fingerprints. Making it changes nothing.

``make_plan(config, sources)`` is pure: ``sources`` maps names of outside things (``data.sft``,
``data.rl``, ``model``, ``tokenizer``, ``rubrics``, ``judge_prompt``) to digests that the edge has
computed; those of a protocol file have its name behind theirs (``rubrics@held-out-v1``). The graph
follows from the recipe's stage list:

    data ─┬─> sft ──> grpo ──> command ──> publish ─┐
          │    │        │         │                 ├─> card
          └────┴────────┴─────────┴──> evaluate (one per model: base, sft, grpo, command)

Each model is evaluated under the recipe's own protocol and under each of ``evaluate.protocols``
(``evaluate-sft@held-out-v1``), on the recipe's held-out prompts or on a set of the protocol's own
(``data@held-out-v1``). Where a protocol measures as another does already, there is one stage, under
the first name.

What is published before training ends is in :mod:`refiner_core.contract.publications`.

``command`` is another trainer; it reads `data` or an earlier model only where its texts name
``{data}`` or ``{model}``. What lies on a Hub is fetched first, by ``fetch``, where the network is:
the stages that read it come *after* that stage without having it as an input, so that where a
model comes from changes no fingerprint. So do those that ask a judge whose server refiner starts:
``judge``, of kind ``serve``, answers before they begin; see :mod:`refiner_core.contract.services`.

Several stages may share a *kind* (``evaluate``); each has a *name* of its own (``evaluate-sft``).
``card`` follows ``publish`` and the evaluations and writes the numbers into the published card, so
that publishing never waits for an evaluation and an evaluation never blocks publishing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from refiner_core.contract.config import CommandConfig, RecipeConfig, Resources
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fingerprint import (
    canonical_json,
    get_field,
    identity_values,
    stage_fingerprint,
)
from refiner_core.contract.plan_memo import PlanMemo
from refiner_core.contract.protocols import AT, configs_under, under
from refiner_core.contract.publications import add_publications
from refiner_core.contract.services import (
    CONSUMERS,
    JUDGE_SERVICE,
    JUDGE_WEIGHTS,
    has_service,
    serves,
    service_identity,
)

StageKind = Literal[
    "fetch", "data", "sft", "grpo", "command", "export", "publish", "evaluate", "card", "serve"
]

#: Raise a kind's number when the same configuration would now give another result.
STAGE_VERSIONS: dict[StageKind, int] = {
    "fetch": 1,
    "data": 1,
    "sft": 1,
    "grpo": 1,
    "command": 1,
    "export": 1,
    "publish": 1,
    "evaluate": 1,
    "card": 1,
    "serve": 1,
}

_TOKENIZER = (
    "model.name_or_path",
    "model.revision",
    "model.tokenizer_name_or_path",
    "model.chat_template",
)
#: Which identity fields a kind depends on (dotted prefixes). Inputs add the rest by fingerprint.
STAGE_FIELDS: dict[StageKind, tuple[str, ...]] = {
    "fetch": (),
    "data": (
        "data",
        *_TOKENIZER,
        "sft.pack_length",
        "grpo.response_length",
        "grpo.max_token_length",
    ),
    "sft": ("seed", "model", "sft"),
    "grpo": ("seed", "model", "grpo", "reward", "judge"),
    "command": ("seed", "command"),
    "export": (),
    "publish": ("publish",),
    "evaluate": (
        "model",
        "evaluate",
        "reward",
        "judge",
        "grpo.response_length",
        "grpo.stop_strings",
    ),
    "card": ("publish.license", "publish.card_template"),
    "serve": (),
}
#: These say which evaluations and publications exist, not what one of them is.
_NOT_IN_A_STAGE = (
    *("evaluate.models", "evaluate.protocols"),
    *("publish.which", "publish.steps", "publish.evaluate"),
)
#: Of these only `publish-best` makes use.
_ONLY_OF_THE_BEST = ("publish.best_metric", "publish.best_decoding")
#: What the lexical judge takes no notice of.
_ONLY_OF_A_SERVED_JUDGE = ("judge.form", "judge.structured_output", "judge.extra_body")
#: Where something lies is no part of what it is, once its content is known by a source's digest.
_NAMED_BY_SOURCE = {
    "data.sft_path": "data.sft",
    "data.rl_path": "data.rl",
    "model.name_or_path": "model",
    "publish.card_template": "card_template",
}
#: Names of what is shipped stay part of what a stage is, as in all older runs; files have digests.
_SHIPPED_OR_FILE = {"reward.static_rubrics": "rubrics", "judge.prompt": "judge_prompt"}

_SOURCES: dict[StageKind, tuple[str, ...]] = {
    "fetch": (),
    "data": ("data.sft", "data.rl", "model"),
    "sft": ("model",),
    "grpo": ("model", "rubrics", "judge_prompt"),
    "command": (),
    "export": (),
    "publish": ("card_template",),
    "evaluate": ("model", "rubrics", "judge_prompt"),
    "card": ("card_template",),
    "serve": (),
}
#: Doubled braces, the shell's own ``${…}``, or a placeholder.
PLACEHOLDER = re.compile(r"\{\{|\}\}|\$\{[^}]*\}|\{(?P<name>[A-Za-z_]+)\}")
#: A source that lies on a Hub has a digest that begins so.
HUB_DIGEST = "hub:"
#: Which sources a kind reads from the Hub's cache; `fetch` brings them there.
_READS: dict[StageKind, tuple[str, ...]] = {
    "data": ("model", "tokenizer", "data.sft", "data.rl"),
    "sft": ("model", "tokenizer"),
    "grpo": ("model", "tokenizer"),
    "export": ("model", "tokenizer"),
    "evaluate": ("model", "tokenizer"),
    "serve": (JUDGE_WEIGHTS,),
}


@dataclass(frozen=True)
class PlannedStage:
    """One stage as it should be.

    ``inputs`` maps a role (``data``, ``policy``, ``weights``, ``evaluation-sft`` …) to the name of
    the stage that fills it. ``model`` names the model that a training stage makes or that an
    evaluation measures: ``base``, ``sft``, ``grpo``, ``command``, ``grpo-step50``. ``after`` names
    stages that must be done first though nothing of theirs is read by path (a cache that they
    fill): no part of what the stage is. ``at_step`` maps roles to steps: of that input its
    checkpoint of the step is read, which is there before the stage ends. ``protocol`` names the
    protocol file that the stage belongs to, empty for the recipe's own; see
    :meth:`Plan.config_of`.
    """

    name: str
    kind: StageKind
    fingerprint: str
    identity: Mapping[str, Any]
    sources: Mapping[str, str]
    inputs: Mapping[str, str]
    input_fingerprints: Mapping[str, str]
    resources: Resources
    model: str = ""
    needs_network: bool = False
    after: tuple[str, ...] = ()
    at_step: Mapping[str, int] = field(default_factory=dict)
    protocol: str = ""

    @property
    def id(self) -> str:
        """Folder-safe id, the same in every run that shares the stage: ``sft-0123456789ab``."""
        return f"{self.kind}-{self.fingerprint[:12]}"

    @property
    def title(self) -> str:
        """What a person reads in tables and in the Prefect UI."""
        return f"{self.name} [{self.fingerprint[:8]}]"


@dataclass(frozen=True)
class Plan:
    """All stages of a recipe in an order in which inputs come first.

    ``given`` are stages that a call is not about (``only``): it reads what they have made, and
    never begins one. ``by_name`` has them, too.
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
        """The configuration that a stage works with: under its protocol, where it has one."""
        return self._under[stage.protocol] if stage.protocol else self.config

    @functools.cached_property
    def _under(self) -> dict[str, RecipeConfig]:
        return configs_under(self.config)

    def find(self, name_or_kind: str) -> list[PlannedStage]:
        """Stages of that name, else of that kind.

        Raises
        ------
        ConfigurationError
            There is none; the message lists what there is.
        """
        hits = [s for s in self.stages if s.name == name_or_kind]
        hits = hits or [s for s in self.stages if s.kind == name_or_kind]
        if not hits:
            names = ", ".join(s.name for s in self.stages)
            raise ConfigurationError(
                f"The plan of {self.recipe} has no stage {name_or_kind!r}.",
                expected=f"one of: {names}",
                fix="name one of these, or add the stage to `stages:` in the recipe",
            )
        return hits


class _Wanted(NamedTuple):
    """A stage that is to be added; see :class:`PlannedStage`."""

    name: str
    kind: StageKind
    inputs: Mapping[str, str]
    protocol: str = ""
    model: str = ""
    at_step: Mapping[str, int] = MappingProxyType({})
    after: tuple[str, ...] = ()


class _Builder:
    """Adds stages one by one; each sees the fingerprints of those before it."""

    def __init__(self, config: RecipeConfig, sources: Mapping[str, str], memo: PlanMemo) -> None:
        self.config, self.sources, self.memo = config, own_sources(sources), memo
        self.under = self._under(sources) if config.evaluate.protocols else {}
        self._numbers: dict[tuple[str, tuple[str, ...]], int] = {}
        self.stages: dict[str, PlannedStage] = {}
        self._evaluations: dict[str, str] = {}

    def _under(self, sources: Mapping[str, str]) -> dict[str, tuple[RecipeConfig, dict[str, str]]]:
        """By protocol file: the configuration under it, whose seed means nothing, and its sources.
        No stage under a protocol depends on the run's seed."""
        config = self.config
        sections = (config.model, config.data, config.sft, config.grpo, config.reward)
        others = (config.judge, config.publish, config.evaluate, config.dispatch)
        made_of = ("under", self.memo.number((*sections, *others)), *sources.items())
        return self.memo.once(
            made_of,
            lambda: {
                name: (measured, sources_under(sources, name, measured))
                for name, measured in configs_under(config).items()
            },
        )

    def add(
        self,
        name: str,
        kind: StageKind,
        inputs: Mapping[str, str],
        *,
        model: str = "",
        at_step: Mapping[str, int] | None = None,
        after: tuple[str, ...] = (),
        protocol: str = "",
    ) -> str:
        wanted = _Wanted(name, kind, inputs, protocol, model, at_step or {}, after)
        self.stages[name] = self._stage(wanted)
        return name

    def _stage(self, stage: _Wanted) -> PlannedStage:
        name, kind, inputs, protocol, model, at_step, after = stage
        config, sources = self.under.get(protocol, (self.config, self.sources))
        fields, needed = STAGE_FIELDS[kind], _SOURCES[kind]
        if kind == "command" and config.command.adopted:
            fields = ("command.adopted",)  # the weights are what they are, whatever made them
        elif kind == "command" and self._starts_at_base(inputs):
            fields, needed = (*fields, "model.name_or_path", "model.revision"), ("model",)
        section = getattr(config, "publish" if kind in ("card", "export") else kind)
        wanted = {k: sources[k] for k in needed if k in sources}
        fingerprints = {role: self.stages[n].fingerprint for role, n in inputs.items()}
        parts, best = self._number(protocol, fields), name == "publish-best"
        steps = {f"{role}.step": step for role, step in at_step.items()}

        def identify() -> tuple[dict[str, Any], str]:
            values = self._identity(protocol, fields, best) | steps
            return values, canonical_json(values)

        def make() -> PlannedStage:
            identity, text = self.memo.once(("identity", parts, best, *steps.items()), identify)
            version = STAGE_VERSIONS[kind]
            return PlannedStage(
                name=name,
                kind=kind,
                fingerprint=stage_fingerprint(
                    kind, version, identity, wanted, fingerprints, text=text
                ),
                identity=identity,
                sources=wanted,
                inputs=dict(inputs),
                input_fingerprints=fingerprints,
                resources=section.resources,
                model=model,
                needs_network=self._needs_network(kind),
                after=after,
                at_step=dict(at_step),
                protocol=protocol,
            )

        named = (name, protocol, model, after, *inputs.items(), *at_step.items(), *wanted.items())
        execution = self.memo.number((section,))
        return self.memo.once((named, parts, execution, *fingerprints.values()), make)

    def _number(self, protocol: str, fields: tuple[str, ...]) -> int:
        """Of all that :meth:`_identity` goes by."""
        if (protocol, fields) not in self._numbers:
            config, sources = self.under.get(protocol, (self.config, self.sources))
            values = (get_field(config, field) for field in fields)
            parts = (*fields, *sources, config.judge.kind, *values)
            self._numbers[protocol, fields] = self.memo.number(parts)
        return self._numbers[protocol, fields]

    def _identity(self, protocol: str, fields: tuple[str, ...], best: bool) -> dict[str, Any]:
        """Identity fields of a stage; ``best``: of the one that publishes the best checkpoint."""
        config, sources = self.under.get(protocol, (self.config, self.sources))
        found: dict[str, Any] = {}
        for part in fields:
            made_of = ("part", self._number(protocol, (part,)), best)
            read = functools.partial(_values, config, sources, (part,), best)
            found |= self.memo.once(made_of, read)
        return found

    def add_publish(self, name: str, inputs: dict[str, str], model: str) -> str:
        """See :class:`refiner_core.contract.publications.Adder`; so are the next ones."""
        return self.add(name, "publish", inputs, model=model)

    def add_card(
        self, name: str, inputs: dict[str, str], model: str, after: tuple[str, ...] = ()
    ) -> str:
        return self.add(name, "card", inputs, model=model, after=after)

    def add_export(self, name: str, policy: str, model: str, step: int) -> str:
        return self.add(name, "export", {"policy": policy}, model=model, at_step={"policy": step})

    def add_evaluations(self, model: str, weights: str) -> dict[str, str]:
        found = {}
        for protocol in ("", *self.under):
            name = self._add_evaluation(model, weights, protocol)
            if name is not None:
                found[under(f"evaluation-{model}", protocol)] = name
        return found

    def _add_evaluation(self, model: str, weights: str, protocol: str) -> str | None:
        """None where another protocol measures the same."""
        inputs = {"data": self._add_data(protocol)}
        if weights:
            inputs["weights"] = weights
        name = under(f"evaluate-{model}", protocol)
        stage = self._stage(_Wanted(name, "evaluate", inputs, protocol, model))
        if self._evaluations.setdefault(stage.id, name) != name:
            return None
        self.stages[name] = stage
        return name

    def _add_data(self, protocol: str) -> str:
        """The stage whose held-out prompts a protocol measures on."""
        if not protocol or not self.under[protocol][0].data.all_held_out:
            return "data"
        name = under("data", protocol)
        if name not in self.stages:
            stage = self._stage(_Wanted(name, "data", {}, protocol))
            same = (s.name for s in self.stages.values() if s.id == stage.id)
            if (found := next(same, None)) is not None:
                return found
            self.stages[name] = stage
        return name

    def reads_data(self, name: str) -> bool:
        return "data" in self.stages[name].inputs

    def with_judges(self) -> dict[str, PlannedStage]:
        """The stages, with each judge's server before the first of those that ask it."""
        found: dict[str, PlannedStage] = {}
        servers: dict[str, PlannedStage] = {}
        for name, stage in self.stages.items():
            found[name] = stage
            if stage.kind not in CONSUMERS:
                continue
            config, _ = self.under.get(stage.protocol, (self.config, self.sources))
            made_of = ("serve", stage.protocol, self.memo.number((config.judge, config.dispatch)))
            make = functools.partial(judge_service, config, stage.protocol)
            service = self.memo.once(made_of, make)
            if service is not None:
                service = servers.setdefault(service.id, service)
                del found[name]
                found.setdefault(service.name, service)
                found[name] = self.memo.changed(stage, after=(*stage.after, service.name))
        return found

    def with_fetch(self) -> tuple[PlannedStage, ...]:
        """The stages, with ``fetch`` before those that read what lies on a Hub."""
        everywhere = (self.sources, *(sources for _, sources in self.under.values()))
        if not any(d.startswith(HUB_DIGEST) for sources in everywhere for d in sources.values()):
            return tuple(self.stages.values())
        reads = {name: self._hub_sources(stage) for name, stage in self.stages.items()}
        wanted = {k: digest for found in reads.values() for k, digest in found.items()}
        if not wanted:
            return tuple(self.stages.values())
        wanted = dict(sorted(wanted.items()))
        fetch = PlannedStage(
            name="fetch",
            kind="fetch",
            fingerprint=stage_fingerprint("fetch", STAGE_VERSIONS["fetch"], {}, wanted, {}),
            identity={},
            sources=wanted,
            inputs={},
            input_fingerprints={},
            resources=replace(self.config.data.resources, gpus=0, nodes=1),
            needs_network=True,
        )
        others = (
            self.memo.changed(stage, after=("fetch", *stage.after)) if reads[name] else stage
            for name, stage in self.stages.items()
        )
        return (fetch, *others)

    def _hub_sources(self, stage: PlannedStage) -> dict[str, str]:
        """What it reads of a Hub: digests by source."""
        config, sources = self.under.get(stage.protocol, (self.config, self.sources))
        names: tuple[str, ...] = _READS.get(stage.kind, ())
        if stage.kind in CONSUMERS and not has_service(config):
            names = (*names, JUDGE_WEIGHTS)  # of a server beside it
        if stage.kind == "command" and "model" in stage.sources:
            names = ("model",)
        hub = {k: sources[k] for k in names if sources.get(k, "").startswith(HUB_DIGEST)}
        own = {k for k, digest in hub.items() if self.sources.get(k) != digest}
        return {under(k, stage.protocol) if k in own else k: v for k, v in hub.items()}

    def _starts_at_base(self, inputs: Mapping[str, str]) -> bool:
        return "policy" not in inputs and uses(self.config.command, "model")

    def _needs_network(self, kind: StageKind) -> bool:
        if kind == "command":
            return self.config.command.needs_network
        return kind in ("publish", "card") and self.config.publish.target == "hub"


def make_plan(
    config: RecipeConfig, sources: Mapping[str, str], memo: PlanMemo | None = None
) -> Plan:
    """The plan of a recipe. Pure: reads nothing but its arguments.

    ``memo``: shared by the plans of one sweep, so that they share their stages.
    """
    _check_stage_list(config)
    builder = _Builder(config, sources, memo or PlanMemo())
    if "data" in config.stages:
        builder.add("data", "data", {})
    models = _add_training(builder)
    final = next(reversed(models))
    roles: dict[str, str] = {}
    if "evaluate" in config.stages:
        for model in (m for m in config.evaluate.models if m in models):
            roles |= builder.add_evaluations(model, models[model])
    if "publish" in config.stages:
        add_publications(builder, models[final], roles)
    builder.stages = builder.with_judges()
    return _only(config, builder.with_fetch())


def _values(
    config: RecipeConfig, sources: Mapping[str, str], fields: tuple[str, ...], best: bool
) -> dict[str, Any]:
    """The identity fields among ``fields``; see :meth:`_Builder._identity`."""
    return {
        path: value
        for path, value in identity_values(config, fields).items()
        if path not in _NOT_IN_A_STAGE
        and _NAMED_BY_SOURCE.get(path) not in sources
        and not ("/" in str(value) and _SHIPPED_OR_FILE.get(path) in sources)
        and (best or path not in _ONLY_OF_THE_BEST)
        and (config.judge.kind == "openai" or path not in _ONLY_OF_A_SERVED_JUDGE)
    }


#: Sources that a protocol file may have of its own.
OF_A_PROTOCOL = ("data.rl", "rubrics", "judge_prompt", JUDGE_WEIGHTS)


def own_sources(sources: Mapping[str, str]) -> dict[str, str]:
    """The recipe's own among the sources of a plan."""
    return {k: v for k, v in sources.items() if AT not in k}


def sources_under(
    sources: Mapping[str, str], protocol: str, measured: RecipeConfig
) -> dict[str, str]:
    """The sources of a configuration under a protocol, by their plain names.

    What is not there under the protocol's name is the recipe's: a protocol that measures as the
    recipe does has left no record of its own.
    """
    reward = measured.reward
    needed = {
        "data.rl": True,
        "rubrics": "static" in reward.rubric_source and not reward.instance_rubrics_only,
        "judge_prompt": measured.judge.kind == "openai",
        JUDGE_WEIGHTS: serves(measured.judge),
    }
    found = {k: v for k, v in own_sources(sources).items() if needed.get(k, True)}
    if measured.data.sft_path is None:
        found.pop("data.sft", None)
    of_its_own = {k: sources[under(k, protocol)] for k in needed if under(k, protocol) in sources}
    return found | of_its_own


def judge_service(config: RecipeConfig, protocol: str = "") -> PlannedStage | None:
    """The stage that serves a configuration's judge; None where refiner starts no server for it, or
    starts it within the jobs that ask it. ``protocol`` names whose judge it is.

    Raises
    ------
    ConfigurationError
        The server would be open to strangers.
    """
    if not has_service(config):
        return None
    values = service_identity(config)
    return PlannedStage(
        name=under(JUDGE_SERVICE, protocol),
        kind="serve",
        fingerprint=stage_fingerprint("serve", STAGE_VERSIONS["serve"], values, {}, {}),
        identity=values,
        sources={},
        inputs={},
        input_fingerprints={},
        resources=config.judge.resources,
        protocol=protocol,
    )


def _only(config: RecipeConfig, stages: tuple[PlannedStage, ...]) -> Plan:
    unknown = [name for name in config.only if name not in {s.name for s in stages}]
    if unknown:
        raise ConfigurationError(
            f"`only` of recipe {config.recipe} names {', '.join(unknown)}.",
            expected=f"some of: {', '.join(s.name for s in stages)}",
            fix="correct `only`, or drop it for all of them",
        )
    if not config.only:
        return Plan(config.recipe, config, stages)
    servers = {s.name for s in stages if s.kind == "serve"}
    needed = {n for s in stages if s.name in config.only for n in s.after if n in servers}
    names = needed.union(config.only)
    wanted = tuple(s for s in stages if s.name in names)
    given = tuple(s for s in stages if s.name not in names)
    return Plan(config.recipe, config, wanted, given)


def _add_training(builder: _Builder) -> dict[str, str]:
    """The stages that train, one on the other: model name -> stage name (empty for the base)."""
    config = builder.config
    models: dict[str, str] = {"base": ""}
    for kind in ("sft", "grpo"):
        if kind not in config.stages:
            continue
        inputs = {"data": "data"}
        if newest := next(reversed(models.values())):
            inputs["policy"] = newest
        models[kind] = builder.add(kind, kind, inputs, model=kind)
    if "command" in config.stages:
        inputs = {"data": "data"} if uses(config.command, "data") else {}
        newest = next(reversed(models.values()))
        if newest and uses(config.command, "model"):
            inputs["policy"] = newest
        models["command"] = builder.add("command", "command", inputs, model="command")
    return models


def uses(command: CommandConfig, placeholder: str) -> bool:
    """Whether a command's texts name ``{placeholder}``."""
    texts = (command.run, command.resume_arguments, command.companions, *command.env)
    return any(placeholder in placeholders(text) for text in texts)


def placeholders(text: str) -> list[str]:
    """The names in single braces, in order: ``{{x}}`` and the shell's ``${x}`` are none."""
    return [m.group("name") for m in PLACEHOLDER.finditer(text) if m.group("name")]


def _check_stage_list(config: RecipeConfig) -> None:
    stages = config.stages
    if len(set(stages)) != len(stages) or not stages:
        raise ConfigurationError(
            f"`stages` of recipe {config.recipe} is {list(stages)}.",
            expected="each stage at most once, and at least one",
            fix="correct `stages:`",
        )
    reads_data = bool({"sft", "grpo", "evaluate"} & set(stages))
    if "command" in stages:
        reads_data = reads_data or uses(config.command, "data")
    if "data" not in stages and (reads_data or "command" not in stages):
        raise ConfigurationError(
            f"`stages` of recipe {config.recipe} has no `data`.",
            expected="`data` first: every other stage reads what it prepares (a `command` does "
            "where it names {data})",
            fix="add `data` to `stages:` (it is skipped where its outputs are there already)",
        )
    if "publish" in stages and not {"sft", "grpo", "command"} & set(stages):
        raise ConfigurationError(
            f"Recipe {config.recipe} publishes, but trains nothing.",
            expected="`sft`, `grpo` or `command` beside `publish`",
            fix="add a training stage to `stages:`, or drop `publish`",
        )
    if "command" in stages and {"sft", "grpo"} & set(stages) and not uses(config.command, "model"):
        raise ConfigurationError(
            f"Recipe {config.recipe} trains a model, and its `command` trains another.",
            expected="a command that starts from that model, by {model}",
            fix="write {model} into `command.run`, or drop the other training stages",
        )
