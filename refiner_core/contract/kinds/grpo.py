"""``grpo``: prompts, samples, judgements and rewards to weights."""

from refiner_core.contract.kinds.kind import (
    MODEL_READS,
    REWARDED_SOURCES,
    REWARDS_2,
    CardWords,
    Kind,
)

KIND = Kind(
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
)
