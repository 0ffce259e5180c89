"""Kinds of stages that come with refiner, in the order of work.

In: nothing. Out: a :class:`~refiner_core.contract.kinds.kind.Kind` each; :data:`.KINDS` has them by
name.
"""

from __future__ import annotations

from collections.abc import Mapping

from refiner_core.contract.config import RecipeConfig, uses
from refiner_core.contract.kinds.kind import (
    ENVIRONMENT_DATA,
    ENVIRONMENT_EVALUATED,
    JUDGE_WEIGHTS,
    MODEL_READS,
    ONLY_OF_EPISODES,
    REWARDED_SOURCES,
    REWARDS_2,
    TOKENIZER,
    CardWords,
    Kind,
    Reads,
)


def _command_reads(kind: Kind, config: RecipeConfig, inputs: Mapping[str, str]) -> Reads:
    if config.command.adopted:  # the weights are what they are, whatever made them
        return Reads(("command.adopted",), ())
    if "policy" not in inputs and uses(config.command, "model"):
        return Reads((*kind.fields, "model.name_or_path", "model.revision"), ("model",))
    return Reads(kind.fields, ())


def _command_inputs(config: RecipeConfig, newest: str) -> dict[str, str]:
    found = {"data": "data"} if uses(config.command, "data") else {}
    return found | ({"policy": newest} if newest and uses(config.command, "model") else {})


def _evaluate_reads(kind: Kind, config: RecipeConfig, inputs: Mapping[str, str]) -> Reads:
    if not config.environment.name:
        return Reads(kind.fields, kind.sources)
    user = () if config.evaluate.user.model else ("environment.user",)
    return Reads((*kind.fields, *ONLY_OF_EPISODES, *user), kind.sources)


#: All of them.
SHIPPED: tuple[Kind, ...] = (
    # Models and data sets of a Hub into this machine's cache.
    Kind("fetch", order=0, run="flows.stages.fetch:run_fetch", section="data", part_of="(hub)"),
    # Rows, or an environment's tasks, to tokenised sets to train on and to hold out.
    Kind(
        "data",
        order=10,
        run="flows.stages.data:run_data",
        version=2,
        version_of_agents=1,
        changes={
            2: "questions that differ in punctuation, quotes or invisible characters alone are one "
            "question, held out or not"
        },
        fields=(
            "data",
            *TOKENIZER,
            "sft.pack_length",
            "grpo.response_length",
            "grpo.max_token_length",
            *ENVIRONMENT_DATA,
        ),
        sources=("data.sft", "data.rl", "model", "environment"),
        hub_reads=("model", "tokenizer", "data.sft", "data.rl"),
    ),
    # Demonstrations to weights.
    Kind(
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
    ),
    # A judge's server, for as long as somebody asks it.
    Kind(
        "serve",
        order=30,
        run="flows.stages.judging:run_serve",
        section="judge",
        part_of="(judge)",
        hub_reads=(JUDGE_WEIGHTS,),
    ),
    # A model's attempts at the training prompts, and those that are worth learning.
    Kind(
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
            # All but what partial credit is worth in training, so that arms with another
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
    ),
    # Rejection fine-tuning, on those of the model's own attempts that were kept.
    Kind(
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
    ),
    # Prompts, samples, judgements and rewards to weights.
    Kind(
        "grpo",
        order=60,
        run="flows.ranks.training:run_training",
        version=2,
        version_of_agents=1,
        changes={2: REWARDS_2},
        fields=("seed", "model", "grpo", "reward", "judge", "environment"),
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
    ),
    # Another trainer's script to weights in the layout of the Hub.
    Kind(
        "command",
        order=70,
        run="flows.stages.foreign:run_foreign",
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
    ),
    # A checkpoint of a training that may still go on to weights in the Hub's layout.
    Kind(
        "export",
        order=80,
        run="flows.stages.export:run_export",
        section="publish",
        part_of="publish",
        hub_reads=MODEL_READS,
    ),
    # Weights and a card to a folder in Hub layout, or to the Hub.
    Kind(
        "publish",
        order=90,
        run="flows.publishing:publish",
        fields=("publish",),
        sources=("card_template",),
        needs_network=lambda config: config.publish.target == "hub",
    ),
    # Weights and a protocol to per-sample results and numbers.
    Kind(
        "evaluate",
        order=100,
        run="flows.stages.evaluating:run_evaluate",
        version=2,
        version_of_agents=1,
        changes={2: REWARDS_2},
        fields=(
            "model",
            "evaluate",
            "reward",
            "judge",
            "grpo.response_length",
            "grpo.stop_strings",
            *ENVIRONMENT_EVALUATED,
        ),
        sources=REWARDED_SOURCES,
        reads=_evaluate_reads,
        hub_reads=MODEL_READS,
        asks_judge=True,
        on_prompts=True,
    ),
    # The published card, with the evaluations' numbers in it.
    Kind(
        "card",
        order=110,
        run="flows.publishing:refresh_card",
        section="publish",
        part_of="publish",
        fields=("publish.license", "publish.card_template"),
        sources=("card_template",),
        needs_network=lambda config: config.publish.target == "hub",
    ),
)
