"""The plan: a recipe's stages as values, with fingerprints. Making it changes nothing.

``make_plan(config, sources)`` is pure: ``sources`` maps names of outside things (``data.sft``,
``data.rl``, ``model``, ``rubrics``, ``judge_prompt``) to digests that the edge has computed. The
graph follows from the recipe's stage list:

    data ─┬─> sft ──> grpo ──> publish ─┐
          │    │        │               ├─> card
          └────┴────────┴──> evaluate (one per model: base, sft, grpo)

Several stages may share a *kind* (``evaluate``); each has a *name* of its own (``evaluate-sft``).
``card`` follows ``publish`` and the evaluations and writes the numbers into the published card, so
that publishing never waits for an evaluation and an evaluation never blocks publishing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from refiner_core.contract.config import RecipeConfig, Resources
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fingerprint import identity_values, stage_fingerprint

StageKind = Literal["fetch", "data", "sft", "grpo", "command", "publish", "evaluate", "card"]

#: Raise a kind's number when the same configuration would now give another result.
STAGE_VERSIONS: dict[StageKind, int] = {
    "fetch": 1,
    "data": 1,
    "sft": 1,
    "grpo": 1,
    "command": 1,
    "publish": 1,
    "evaluate": 1,
    "card": 1,
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
    "publish": ("publish",),
    "evaluate": (
        "model",
        "evaluate",
        "reward",
        "judge",
        "grpo.response_length",
        "grpo.stop_strings",
    ),
    "card": ("publish.license",),
}
#: ``evaluate.models`` says which evaluations exist, not what one of them is.
_NOT_IN_EVALUATION = ("evaluate.models",)
#: Where something lies is no part of what it is, once its content is known by a source's digest.
_NAMED_BY_SOURCE = {
    "data.sft_path": "data.sft",
    "data.rl_path": "data.rl",
    "model.name_or_path": "model",
}

_SOURCES: dict[StageKind, tuple[str, ...]] = {
    "fetch": ("data.sft", "data.rl", "model"),
    "data": ("data.sft", "data.rl", "model"),
    "sft": ("model",),
    "grpo": ("model", "rubrics", "judge_prompt"),
    "command": (),
    "publish": (),
    "evaluate": ("model", "rubrics", "judge_prompt"),
    "card": (),
}
_NEEDS_NETWORK: frozenset[StageKind] = frozenset({"publish", "card"})


@dataclass(frozen=True)
class PlannedStage:
    """One stage as it should be.

    ``inputs`` maps a role (``data``, ``policy``, ``weights``, ``evaluation-sft`` …) to the name of
    the stage that fills it. ``model`` names the model that a training stage makes or that an
    evaluation measures: ``base``, ``sft``, ``grpo``, ``command``. ``after`` names stages that must
    be done first though nothing of theirs is read by path (a cache that they fill): no part of what
    the stage is.
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
    """All stages of a recipe in an order in which inputs come first."""

    recipe: str
    config: RecipeConfig
    stages: tuple[PlannedStage, ...]
    by_name: Mapping[str, PlannedStage] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {s.name: s for s in self.stages})

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


class _Builder:
    """Adds stages one by one; each sees the fingerprints of those before it."""

    def __init__(self, config: RecipeConfig, sources: Mapping[str, str]) -> None:
        self.config, self.sources = config, sources
        self.stages: dict[str, PlannedStage] = {}

    def add(self, name: str, kind: StageKind, inputs: Mapping[str, str], *, model: str = "") -> str:
        values = identity_values(self.config, STAGE_FIELDS[kind])
        values = {
            path: value
            for path, value in values.items()
            if path not in _NOT_IN_EVALUATION and _NAMED_BY_SOURCE.get(path) not in self.sources
        }
        wanted = {k: self.sources[k] for k in _SOURCES[kind] if k in self.sources}
        fingerprints = {role: self.stages[n].fingerprint for role, n in inputs.items()}
        section = getattr(self.config, "publish" if kind == "card" else kind)
        self.stages[name] = PlannedStage(
            name=name,
            kind=kind,
            fingerprint=stage_fingerprint(kind, STAGE_VERSIONS[kind], values, wanted, fingerprints),
            identity=values,
            sources=wanted,
            inputs=dict(inputs),
            input_fingerprints=fingerprints,
            resources=section.resources,
            model=model,
            needs_network=kind in _NEEDS_NETWORK and self.config.publish.target == "hub",
        )
        return name


def make_plan(config: RecipeConfig, sources: Mapping[str, str]) -> Plan:
    """The plan of a recipe. Pure: reads nothing but its arguments."""
    _check_stage_list(config)
    builder = _Builder(config, sources)
    if "data" in config.stages:
        builder.add("data", "data", {})
    models: dict[str, str] = {"base": ""}
    for kind in ("sft", "grpo"):
        if kind not in config.stages:
            continue
        inputs = {"data": "data"}
        if newest := next(reversed(models.values())):
            inputs["policy"] = newest
        models[kind] = builder.add(kind, kind, inputs, model=kind)
    final = next(reversed(models))
    if "publish" in config.stages:
        builder.add("publish", "publish", {"weights": models[final], "data": "data"}, model=final)
    evaluations: dict[str, str] = {}
    if "evaluate" in config.stages:
        for model in (m for m in config.evaluate.models if m in models):
            inputs = {"data": "data"}
            if models[model]:
                inputs["weights"] = models[model]
            name = builder.add(f"evaluate-{model}", "evaluate", inputs, model=model)
            evaluations[f"evaluation-{model}"] = name
    if "publish" in config.stages and evaluations:
        builder.add("card", "card", {"publish": "publish", **evaluations}, model=final)
    return Plan(config.recipe, config, tuple(builder.stages.values()))


def _check_stage_list(config: RecipeConfig) -> None:
    stages = config.stages
    if len(set(stages)) != len(stages) or not stages:
        raise ConfigurationError(
            f"`stages` of recipe {config.recipe} is {list(stages)}.",
            expected="each stage at most once, and at least one",
            fix="correct `stages:`",
        )
    if "data" not in stages:
        raise ConfigurationError(
            f"`stages` of recipe {config.recipe} has no `data`.",
            expected="`data` first: every other stage reads what it prepares",
            fix="add `data` to `stages:` (it is skipped where its outputs are there already)",
        )
    if "publish" in stages and not {"sft", "grpo"} & set(stages):
        raise ConfigurationError(
            f"Recipe {config.recipe} publishes, but trains nothing.",
            expected="`sft` or `grpo` beside `publish`",
            fix="add a training stage to `stages:`, or drop `publish`",
        )
