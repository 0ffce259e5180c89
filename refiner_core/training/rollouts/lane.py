"""What a rollout is: an answer to a prompt, or an episode of a task.

In: the recipe. Out: a :class:`Lane`, which samples, rewards, groups, counts and writes rollouts.
Everything else about a GRPO step is the same for both: when what is sampled, what is in flight, the
update, checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from refiner_core.contract.checks.environment import (
    alpha_of,
    check_curriculum,
    check_domains,
    check_shaping,
)
from refiner_core.contract.config import GrpoConfig, RecipeConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.types import Judge, PromptRow, RewardResult
from refiner_core.environments.protocol import Environment, domain_of_id
from refiner_core.environments.registry import open_environment
from refiner_core.environments.scoring import Curriculum, require_episodes
from refiner_core.rewards import require_scored
from refiner_core.training.rollouts.episodes import (
    EPISODE_COUNTS,
    EPISODE_CURVES,
    EpisodeBatch,
    EpisodeRewards,
    EpisodeSampler,
    attempts,
    check_progress,
    check_tasks,
    episode_metrics,
    episode_rows,
    form_episode_groups,
    longest_episode,
    own_tokens,
    record_of,
)
from refiner_core.training.rollouts.policies import Policy
from refiner_core.training.rollouts.rollout import (
    RewardFunction,
    RolloutBatch,
    RolloutRewards,
    RolloutSampler,
    Sampled,
    Sampler,
    StepRewards,
    check_lengths,
    form_groups,
    rollout_metrics,
    rollout_rows,
)

#: Attempts and successes by task.
Attempts = Mapping[str, tuple[int, int]]


class Lane(Protocol):
    """Rollouts of one kind. Rank 0's has what rewards; the others' sample alone."""

    #: Counts and curves that a report keeps beside the usual ones.
    counts: tuple[str, ...]
    curves: tuple[str, ...]

    def check(self, prompts: Sequence[PromptRow]) -> None:
        """Refuse, before anything is sampled, prompts that do not fit."""
        ...

    @property
    def longest(self) -> int:
        """Most tokens that a rollout can have sampled."""
        ...

    def sampler(self, policy: Policy, tokenizer: Any) -> Sampler:
        """What samples."""
        ...

    def new_rewards(self, patient: bool) -> RolloutRewards:
        """What rewards a batch (rank 0's)."""
        ...

    def require(self, results: Sequence[RewardResult]) -> None:
        """Refuse to train where too many rollouts have no reward."""
        ...

    def groups(self, samples: Sequence[Sampled], results: Sequence[RewardResult]) -> RolloutBatch:
        """Advantages within groups."""
        ...

    def metrics(self, batch: Any) -> dict[str, float]:
        """Numbers of a step's rollouts."""
        ...

    def rows(self, step: int, batch: Any) -> list[dict[str, Any]]:
        """A step's rollouts as they are kept."""
        ...

    def sampled_tokens(self, batch: RolloutBatch) -> int:
        """Tokens that the policy has sampled."""
        ...

    def attempts(self, batch: Any) -> Attempts:
        """What the step adds to the counters of tasks."""
        ...

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Take back what a checkpoint's progress holds."""
        ...

    def count(self, progress: dict[str, Any], attempts: Attempts) -> None:
        """A step is counted."""
        ...

    def report(self) -> dict[str, Any]:
        """What a report says beside the usual."""
        ...


def longest_of(lane: Lane, prompts: Sequence[PromptRow], grpo: GrpoConfig) -> int:
    """Most tokens that one of these prompts and what is sampled for it can have."""
    longest = max(len(row.prompt_ids) for row in prompts) + lane.longest
    return min(longest, grpo.max_token_length)


class AnswerLane:
    """One prompt, one answer."""

    counts: tuple[str, ...] = ()
    curves: tuple[str, ...] = ()

    def __init__(
        self, config: RecipeConfig, judge: Judge | None, rewards: RewardFunction | None
    ) -> None:
        self.config, self.grpo, self._judge = config, config.grpo, judge
        self._rewards = rewards

    def check(self, prompts: Sequence[PromptRow]) -> None:
        """See :func:`refiner_core.training.rollouts.rollout.check_lengths`."""
        check_lengths(prompts, self.grpo)

    @property
    def longest(self) -> int:
        """``grpo.response_length``."""
        return self.grpo.response_length

    def sampler(self, policy: Policy, tokenizer: Any) -> Sampler:
        """Answers."""
        return RolloutSampler(self.grpo, self.config.seed, policy, tokenizer)

    def new_rewards(self, patient: bool) -> RolloutRewards:
        """The judge's."""
        assert self._judge is not None
        return StepRewards(self.config.reward, self._judge, self._rewards, patient=patient)

    def require(self, results: Sequence[RewardResult]) -> None:
        """See :func:`refiner_core.rewards.require_scored`."""
        require_scored(results, self.config.judge.max_failed_share, of="rollouts of a step")

    def groups(self, samples: Sequence[Sampled], results: Sequence[RewardResult]) -> RolloutBatch:
        """See :func:`refiner_core.training.rollouts.rollout.form_groups`."""
        grpo = self.grpo
        return form_groups(
            samples,
            results,
            size=grpo.num_samples_per_prompt_rollout,
            normalization=grpo.advantage_normalization_type,
        )

    metrics = staticmethod(rollout_metrics)
    rows = staticmethod(rollout_rows)

    def sampled_tokens(self, batch: RolloutBatch) -> int:
        """All tokens of the answers."""
        return sum(len(sample.completion.token_ids) for sample in batch.samples)

    def attempts(self, batch: RolloutBatch) -> Attempts:
        """Nothing is counted by prompt."""
        return {}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Nothing is kept."""

    def count(self, progress: dict[str, Any], attempts: Attempts) -> None:
        """Nothing is kept."""

    def report(self) -> dict[str, Any]:
        """Nothing further."""
        return {}


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


def open_lane(
    config: RecipeConfig,
    *,
    judge: Judge | None,
    rewards: RewardFunction | None,
    environment: Environment | None,
    samples: bool,
) -> Lane:
    """The lane of a recipe.

    Parameters
    ----------
    environment
        The one to use; None opens the recipe's, where it has one and this rank ``samples``.

    Raises
    ------
    ConfigurationError, UnsupportedError
        See :func:`refiner_core.environments.registry.open_environment`.
    """
    if not config.environment.name:
        return AnswerLane(config, judge, rewards)

    return EpisodeLane(config, judge, environment, samples=samples)
