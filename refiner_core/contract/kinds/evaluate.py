"""``evaluate``: weights and a protocol to per-sample results and numbers."""

from __future__ import annotations

from collections.abc import Mapping

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.kinds.kind import (
    ENVIRONMENT_EVALUATED,
    MODEL_READS,
    REWARDED_SOURCES,
    REWARDS_2,
    Kind,
    Reads,
)

#: Fields that affect an episode's evaluation, but not an answer's.
ONLY_OF_EPISODES = ("grpo.max_token_length",)


def _reads(kind: Kind, config: RecipeConfig, inputs: Mapping[str, str]) -> Reads:
    if not config.environment.name:
        return Reads(kind.fields, kind.sources)
    user = () if config.evaluate.user.model else ("environment.user",)
    return Reads((*kind.fields, *ONLY_OF_EPISODES, *user), kind.sources)


EVALUATE = Kind(
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
    reads=_reads,
    hub_reads=MODEL_READS,
    asks_judge=True,
    on_prompts=True,
    samples_with="evaluate",
)

KINDS = (EVALUATE,)
