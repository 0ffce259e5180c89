"""Kinds that make a model, and the kind that samples for one."""

from __future__ import annotations

from collections.abc import Mapping

from refiner_core.contract.config import RecipeConfig, uses
from refiner_core.contract.kinds.kind import (
    ENVIRONMENT_DATA,
    ENVIRONMENT_EVALUATED,
    MODEL_READS,
    REWARDED_SOURCES,
    REWARDS_2,
    CardWords,
    Kind,
    Reads,
)

#: ``sft``: demonstrations to weights.
SFT = Kind(
    "sft",
    order=20,
    run="flows.ranks.training:run_training",
    fields=("seed", "model", "sft"),
    sources=("model",),
    hub_reads=MODEL_READS,
    trains="demonstrations",
    label="SFT",
    card=CardWords(
        algorithm="Supervised fine-tuning (SFT)",
        short="SFT",
        tags=("sft",),
        made="fine-tuned on demonstrations of cited answers",
        made_by_agents="fine-tuned on conversations with tools",
        sections=("model", "sft", "data", "seed"),
        silent=("grpo.", "reward.", "judge.", "command.", "publish.", "evaluate."),
    ),
)

#: ``sample``: a model's attempts at the training prompts, and the selection of good ones.
SAMPLE = Kind(
    "sample",
    order=40,
    run="flows.stages.sampling:run_sample",
    part_of="rft",
    version=2,
    version_of_agents=1,
    changes={2: REWARDS_2},
    fields=(
        "seed",
        "model",
        "sample",
        "reward",
        "judge",
        # All except the weight of partial credit in training, so that arms with another
        # ``shaping.alpha`` share the attempts.
        *dict.fromkeys((*ENVIRONMENT_DATA, *ENVIRONMENT_EVALUATED)),
        "environment.user",
        "grpo.response_length",
        "grpo.max_token_length",
        "grpo.stop_strings",
    ),
    sources=REWARDED_SOURCES,
    hub_reads=MODEL_READS,
    asks_judge=True,
    samples_with="sample",
    shown_where_used=True,
)

#: ``rft``: rejection fine-tuning, on those of the model's own attempts that were kept.
RFT = Kind(
    "rft",
    order=50,
    run="flows.ranks.training:run_training",
    fields=("seed", "model", "rft"),
    sources=("model",),
    hub_reads=MODEL_READS,
    trains="demonstrations",
    learns_from="sample",
    on_prompts=True,
    shown_where_used=True,
    label="RFT",
    card=CardWords(
        algorithm="Rejection fine-tuning (RFT)",
        short="RFT",
        tags=("rft",),
        made="fine-tuned on its own best answers (rejection fine-tuning)",
        made_by_agents="fine-tuned on its own best attempts (rejection fine-tuning)",
        sections=("model", "sample", "rft", "reward", "judge", "data", "seed"),
        silent=("grpo.", "command.", "publish.", "evaluate."),
        data_sets=("sft", "rl"),
    ),
)

#: ``grpo``: prompts, samples, judgements and rewards to weights.
GRPO = Kind(
    "grpo",
    order=60,
    run="flows.ranks.training:run_training",
    version=2,
    version_of_agents=1,
    changes={2: REWARDS_2},
    fields=("seed", "model", "grpo", "reward", "judge", "environment", "monitor"),
    sources=REWARDED_SOURCES,
    hub_reads=MODEL_READS,
    trains="rewards",
    asks_judge=True,
    on_prompts=True,
    samples_with="grpo",
    label="GRPO",
    card=CardWords(
        algorithm="Group-relative policy optimisation (GRPO)",
        short="GRPO",
        tags=("grpo", "rlhf"),
        made="trained with group-relative policy optimisation on judged rubrics and citations",
        made_by_agents="trained with group-relative policy optimisation on what its episodes "
        "achieved",
        sections=("model", "reward", "judge", "data"),
        silent=("command.", "publish.", "evaluate."),
        data_sets=("sft", "rl"),
    ),
)


def _command_reads(kind: Kind, config: RecipeConfig, inputs: Mapping[str, str]) -> Reads:
    if config.command.adopted:  # the weights are fixed, whatever made them
        return Reads(("command.adopted",), ())
    if "policy" not in inputs and uses(config.command, "model"):
        return Reads((*kind.fields, "model.name_or_path", "model.revision"), ("model",))
    return Reads(kind.fields, ())


def _command_inputs(config: RecipeConfig, newest: str) -> dict[str, str]:
    found = {"data": "data"} if uses(config.command, "data") else {}
    return found | ({"policy": newest} if newest and uses(config.command, "model") else {})


#: ``command``: another trainer's script to weights in the layout of the Hub.
COMMAND = Kind(
    "command",
    order=70,
    run="flows.stages.external:run_external",
    fields=("seed", "command"),
    reads=_command_reads,
    trains="elsewhere",
    inputs=_command_inputs,
    needs_network=lambda config: config.command.needs_network,
    label="external",
    card=CardWords(
        algorithm="that of another trainer",
        short="Externally trained",
        tags=("command",),
        sections=("command", "seed"),
        silent=("grpo.", "reward.", "judge.", "sft.", "publish.", "evaluate."),
        data_sets=(),
    ),
)

KINDS = (SFT, SAMPLE, RFT, GRPO, COMMAND)
