"""``sample``: a model's attempts at the training prompts, and those that are worth learning."""

from refiner_core.contract.kinds.kind import (
    ENVIRONMENT_DATA,
    ENVIRONMENT_EVALUATED,
    MODEL_READS,
    REWARDED_SOURCES,
    REWARDS_2,
    Kind,
)

KIND = Kind(
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
)
