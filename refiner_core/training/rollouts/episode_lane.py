"""The lane of tool use: a rollout is an episode of a task.

In: the recipe, an environment. Out: what :class:`~refiner_core.training.rollouts.lane.Lane` asks
for, and counters of attempts by task, which are part of a checkpoint's progress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from refiner_core.contract.checks.shaping import (
    alpha_of,
    check_curriculum,
    check_domains,
    check_shaping,
)
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.types import Judge, PromptRow, RewardResult
from refiner_core.environments.protocol import Environment
from refiner_core.environments.registry import open_environment
from refiner_core.environments.rows import domain_of_id
from refiner_core.environments.scoring import Curriculum, require_episodes
from refiner_core.training.rollouts.credit import EpisodeBatch, form_episode_groups, own_tokens
from refiner_core.training.rollouts.episodes import (
    EPISODE_COUNTS,
    EPISODE_CURVES,
    EpisodeRewards,
    EpisodeSampler,
    attempts,
    check_progress,
    check_tasks,
    episode_metrics,
    episode_rows,
    longest_episode,
    record_of,
)
from refiner_core.training.rollouts.lane import Attempts
from refiner_core.training.rollouts.policies import Policy
from refiner_core.training.rollouts.rollout import RolloutBatch, RolloutRewards, Sampled, Sampler

#: Where the counters stand in the progress.
PROGRESS = "curriculum"


class EpisodeLane:
    """Tasks and episodes.

    Parameters
    ----------
    environment
        The one to use; None opens the recipe's, where this rank ``samples``.

    Raises
    ------
    UnsupportedError
        The environment asks a judge, which rank 0 alone has, and every rank samples.
    """

    counts: tuple[str, ...] = EPISODE_COUNTS
    curves: tuple[str, ...] = EPISODE_CURVES

    def __init__(
        self,
        config: RecipeConfig,
        judge: Judge | None,
        environment: Environment | None,
        *,
        samples: bool,
    ) -> None:
        check_shaping(config.environment.shaping)
        check_curriculum(config.grpo.curriculum)
        self.config, self.grpo = config, config.grpo
        self.environment = environment
        if environment is None and samples:
            if judge is None and config.environment.nl_assertions == "judge":
                raise UnsupportedError(
                    "environment.nl_assertions is judge, and this process samples episodes "
                    "without a judge: one process of a stage has it",
                    expected="one training process, or rollout servers, from which it samples",
                    fix="set grpo.nproc_per_node=1, grpo.generation_backend=vllm, or "
                    "environment.nl_assertions=exclude",
                )
            self.environment = open_environment(config, evaluation=False, judge=judge)
        self.curriculum = Curriculum(config.grpo.curriculum)

    def check(self, prompts: Sequence[PromptRow]) -> None:
        """See :func:`~refiner_core.training.rollouts.episodes.check_tasks` and
        :func:`~refiner_core.training.rollouts.episodes.check_progress`."""
        check_tasks(prompts, self.config)
        if self.environment is not None and not self.config.environment.domains:
            # the data stage has said so too, but is skipped where its outputs are there already
            check_domains(self.config.environment.shaping, self.environment.domains())
        if self.environment is not None and self.grpo.credit == "turn_rewards":
            check_progress(self.environment, prompts)

    @property
    def longest(self) -> int:
        """See :func:`~refiner_core.training.rollouts.episodes.longest_episode`."""
        return longest_episode(self.config)

    def sampler(self, policy: Policy, tokenizer: Any) -> Sampler:
        """Episodes."""
        return EpisodeSampler(self.config, policy, tokenizer, self.environment)

    def new_rewards(self, patient: bool) -> RolloutRewards:
        """What the environment said, shaped."""
        return EpisodeRewards(self.config.environment)

    def require(self, results: Sequence[RewardResult]) -> None:
        """See :func:`~refiner_core.environments.scoring.require_episodes`."""
        share = self.config.environment.max_error_share
        require_episodes(results, share, of="episodes of a step")

    def groups(self, samples: Sequence[Sampled], results: Sequence[RewardResult]) -> EpisodeBatch:
        """Advantages by the recipe's credit, times the curriculum's weights before this step."""
        return form_episode_groups(
            samples,
            results,
            [record_of(sample) for sample in samples],
            self.grpo,
            alpha=partial(alpha_of, self.config.environment.shaping),
            weight=self.curriculum.weight,
        )

    metrics = staticmethod(episode_metrics)
    rows = staticmethod(episode_rows)
    attempts = staticmethod(attempts)

    def sampled_tokens(self, batch: RolloutBatch) -> int:
        """The model's own tokens."""
        return sum(sum(own_tokens(sample.completion)) for sample in batch.samples)

    def restore(self, progress: Mapping[str, Any]) -> None:
        """The counters of tasks."""
        self.curriculum.restore(progress.get(PROGRESS))

    def count(self, progress: dict[str, Any], attempts: Attempts) -> None:
        """Add a step's attempts to the counters."""
        for task, (tried, solved) in attempts.items():
            self.curriculum.count(task, tried, solved)
        progress[PROGRESS] = self.curriculum.state()

    def report(self) -> dict[str, Any]:
        """Attempts and successes in training, by domain."""
        domains: dict[str, dict[str, int]] = {}
        for task, (tried, solved) in sorted(self.curriculum.state().items()):
            found = domains.setdefault(domain_of_id(task), {"attempts": 0, "successes": 0})
            found["attempts"] += tried
            found["successes"] += solved
        return {"domains": domains}
