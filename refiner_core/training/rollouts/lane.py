"""What a rollout is: an answer to a prompt, or an episode of a task.

In: the recipe. Out: a :class:`Lane`, which samples, rewards, groups, counts and writes rollouts.
Everything else about a GRPO step is the same for both: when what is sampled, what is in flight, the
update, checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from refiner_core.contract.config import GrpoConfig, RecipeConfig
from refiner_core.contract.types import Judge, PromptRow, RewardResult
from refiner_core.rewards import require_scored
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
)
from refiner_core.training.rollouts.rows import rollout_metrics, rollout_rows

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
