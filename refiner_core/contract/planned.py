"""Stages as values: kinds, what each depends on, and a stage as it should be.

In: nothing. Out: :class:`PlannedStage`, and the tables by which :mod:`.plan_builder` makes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from refiner_core.contract.config import CommandConfig, Resources
from refiner_core.contract.services import JUDGE_WEIGHTS

StageKind = Literal[
    "fetch",
    "data",
    "sft",
    "sample",
    "rft",
    "grpo",
    "command",
    "export",
    "publish",
    "evaluate",
    "card",
    "serve",
]

#: Models that a run may train, and those that it may measure, in the order in which they come.
TRAINED: tuple[StageKind, ...] = ("sft", "rft", "grpo", "command")
MODELS: tuple[str, ...] = ("base", *TRAINED)

#: Raise a kind's number when the same configuration would now give another result, and say in
#: :data:`STAGE_CHANGES` what is different.
STAGE_VERSIONS: dict[StageKind, int] = {
    "fetch": 1,
    "data": 2,
    "sft": 1,
    "sample": 2,
    "rft": 1,
    "grpo": 2,
    "command": 1,
    "export": 1,
    "publish": 1,
    "evaluate": 2,
    "card": 1,
    "serve": 1,
}
#: Where they differ in recipes with an environment, whose tasks and rewards are its own.
STAGE_VERSIONS_OF_AGENTS: dict[StageKind, int] = {"data": 1, "sample": 1, "grpo": 1, "evaluate": 1}
_REWARDS_2 = "a claim counts once in the citation reward, however often an answer repeats it"
#: What a version of a kind does otherwise than the one before it.
STAGE_CHANGES: dict[tuple[str, int], str] = {
    ("data", 2): "questions that differ in punctuation, quotes or invisible characters alone are "
    "one question, held out or not",
    ("sample", 2): _REWARDS_2,
    ("grpo", 2): _REWARDS_2,
    ("evaluate", 2): _REWARDS_2,
}

_TOKENIZER = (
    "model.name_or_path",
    "model.revision",
    "model.tokenizer_name_or_path",
    "model.chat_template",
)
#: Of the environment, what decides which tasks and demonstrations there are.
ENVIRONMENT_DATA = tuple(
    f"environment.{name}"
    for name in (
        "name",
        "domains",
        "train_split",
        "test_split",
        "tasks",
        "max_train_tasks",
        "demonstrations",
        "flawed_demonstrations",
        "max_argument_bytes",  # a longer call is none, in demonstrations too
    )
)
#: Of the environment, what decides how an agent's episodes go and what they are worth.
ENVIRONMENT_EVALUATED = tuple(
    f"environment.{name}"
    for name in (
        "name",
        "max_turns",
        "repairs",
        "max_argument_bytes",
        "nl_assertions",
        "schedule",
        "shaping.weights",
        "shaping.weights_by_domain",
    )
)
#: What attempts depend on: all but what partial credit is worth in training, so that arms with
#: another ``shaping.alpha`` share them.
ENVIRONMENT_SAMPLED = (
    *dict.fromkeys((*ENVIRONMENT_DATA, *ENVIRONMENT_EVALUATED)),
    "environment.user",
)
#: What an episode's evaluation depends on, and an answer's does not.
ONLY_OF_EPISODES = ("grpo.max_token_length",)
#: Which identity fields a kind depends on (dotted prefixes). Inputs add the rest by fingerprint.
STAGE_FIELDS: dict[StageKind, tuple[str, ...]] = {
    "fetch": (),
    "data": (
        "data",
        *_TOKENIZER,
        "sft.pack_length",
        "grpo.response_length",
        "grpo.max_token_length",
        *ENVIRONMENT_DATA,
    ),
    "sft": ("seed", "model", "sft"),
    "sample": (
        "seed",
        "model",
        "sample",
        "reward",
        "judge",
        *ENVIRONMENT_SAMPLED,
        "grpo.response_length",
        "grpo.max_token_length",
        "grpo.stop_strings",
    ),
    "rft": ("seed", "model", "rft"),
    "grpo": ("seed", "model", "grpo", "reward", "judge", "environment"),
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
        *ENVIRONMENT_EVALUATED,
    ),
    "card": ("publish.license", "publish.card_template"),
    "serve": (),
}
#: These say which evaluations and publications exist, not what one of them is.
NOT_IN_A_STAGE = (
    *("evaluate.models", "evaluate.protocols"),
    *("publish.which", "publish.steps", "publish.evaluate"),
)
#: Of these only `publish-best` makes use.
ONLY_OF_THE_BEST = ("publish.best_metric", "publish.best_decoding")
#: What the lexical judge takes no notice of.
ONLY_OF_A_SERVED_JUDGE = ("judge.form", "judge.structured_output", "judge.extra_body")
#: Limits of health checks, and the checks that go by them.
HEALTH_CHECKS_OF = {
    "spike_factor": ("loss_spike",),
    "min_entropy": ("entropy_collapse",),
    "max_truncated_share": ("length_explosion",),
    "max_kl": ("kl_blow_up",),
    "patience": ("entropy_collapse", "zero_reward_variance", "length_explosion", "kl_blow_up"),
}
#: Where something lies is no part of what it is, once its content is known by a source's digest.
NAMED_BY_SOURCE = {
    "data.sft_path": "data.sft",
    "data.rl_path": "data.rl",
    "model.name_or_path": "model",
    "publish.card_template": "card_template",
    "environment.tasks": "environment",
}
#: Names of what is shipped stay part of what a stage is, as in all older runs; files have digests.
SHIPPED_OR_FILE = {
    "reward.static_rubrics": "rubrics",
    "judge.prompt": "judge_prompt",
    "environment.name": "environment",
}

STAGE_SOURCES: dict[StageKind, tuple[str, ...]] = {
    "fetch": (),
    "data": ("data.sft", "data.rl", "model", "environment"),
    "sft": ("model",),
    "sample": ("model", "rubrics", "judge_prompt", "environment"),
    "rft": ("model",),
    "grpo": ("model", "rubrics", "judge_prompt", "environment"),
    "command": (),
    "export": (),
    "publish": ("card_template",),
    "evaluate": ("model", "rubrics", "judge_prompt", "environment"),
    "card": ("card_template",),
    "serve": (),
}
#: Doubled braces, the shell's own ``${…}``, or a placeholder.
PLACEHOLDER = re.compile(r"\{\{|\}\}|\$\{[^}]*\}|\{(?P<name>[A-Za-z_]+)\}")
#: A source that lies on a Hub has a digest that begins so.
HUB_DIGEST = "hub:"
#: Which sources a kind reads from the Hub's cache; `fetch` brings them there.
HUB_READS: dict[StageKind, tuple[str, ...]] = {
    "data": ("model", "tokenizer", "data.sft", "data.rl"),
    "sft": ("model", "tokenizer"),
    "sample": ("model", "tokenizer"),
    "rft": ("model", "tokenizer"),
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
    evaluation measures: ``base``, ``sft``, ``rft``, ``grpo``, ``command``, ``grpo-step50``.
    ``version`` is that of its kind in a recipe of its kind (:func:`stage_version`). ``after`` names
    stages that must be done first though nothing of theirs is read by path (a cache that they
    fill): no part of what the stage is. ``at_step`` maps roles to steps: of that
    input its checkpoint of the step is read, which is there before the stage ends. ``protocol``
    names the protocol file that the stage belongs to, empty for the recipe's own; see
    :meth:`refiner_core.contract.plan.Plan.config_of`.
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
    version: int = 1

    @property
    def id(self) -> str:
        """Folder-safe id, the same in every run that shares the stage: ``sft-0123456789ab``."""
        return f"{self.kind}-{self.fingerprint[:12]}"

    @property
    def title(self) -> str:
        """What a person reads in tables and in the Prefect UI."""
        return f"{self.name} [{self.fingerprint[:8]}]"


def stage_version(kind: StageKind, *, agents: bool) -> int:
    """The version of a kind of stage; ``agents``: in a recipe with an environment."""
    version = STAGE_VERSIONS[kind]
    return STAGE_VERSIONS_OF_AGENTS.get(kind, version) if agents else version


def stage_changes(kind: str, version: int, since: int = 1) -> str:
    """What a version of a kind does otherwise than an older one, in words; empty of an unknown."""
    versions = range(since + 1, version + 1)
    return "; ".join(STAGE_CHANGES[kind, v] for v in versions if (kind, v) in STAGE_CHANGES)


def uses(command: CommandConfig, placeholder: str) -> bool:
    """Whether a command's texts name ``{placeholder}``."""
    texts = (command.run, command.resume_arguments, command.companions, *command.env)
    return any(placeholder in placeholders(text) for text in texts)


def placeholders(text: str) -> list[str]:
    """The names in single braces, in order: ``{{x}}`` and the shell's ``${x}`` are none."""
    return [m.group("name") for m in PLACEHOLDER.finditer(text) if m.group("name")]
