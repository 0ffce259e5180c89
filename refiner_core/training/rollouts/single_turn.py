"""Lanes: the kinds of rollouts. Here: one answer to a prompt; episodes of a task are in
:mod:`refiner_core.training.rollouts.multi_turn`.

In: the recipe. Out: a :class:`SingleTurnTask`, which samples, rewards, groups, counts and writes
rollouts. The rest of a GRPO step is the same for both: the schedule, batches in flight, the update,
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refiner_core.contract.config import GrpoConfig, RecipeConfig
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.types import (
    Completion,
    Judge,
    OnCompletion,
    PromptRow,
    RewardResult,
    SamplingParams,
)
from refiner_core.generation.completions import closing_ids, completion_text
from refiner_core.rewards import RewardInput, RewardStream, require_scored
from refiner_core.samples import PlannedSample, sample_answers
from refiner_core.training.rollouts.policies import Policy
from refiner_core.training.rollouts.rollout import (
    RolloutBatch,
    RolloutSample,
    form_groups,
    rollout_metrics,
    rollout_rows,
)

#: Attempts and successes by task.
Attempts = Mapping[str, tuple[int, int]]


class SingleTurnTask:
    """One prompt, one answer. Rank 0's lane also rewards; the others only sample."""

    #: Additional counts and curves of the report.
    counts: tuple[str, ...] = ()
    curves: tuple[str, ...] = ()

    def __init__(self, config: RecipeConfig, judge: Judge | None) -> None:
        self.config, self.grpo, self._judge = config, config.grpo, judge

    def check(self, prompts: Sequence[PromptRow]) -> None:
        """Nothing to check: the configuration has space for every prompt kept by the data stage."""

    @property
    def longest(self) -> int:
        """The most tokens that a rollout can sample."""
        return self.grpo.response_length

    def wanted(
        self, prompts: Sequence[PromptRow], step: int, indices: Sequence[int]
    ) -> list[PlannedSample]:
        """All samples of some prompts in a step, grouped by prompt."""
        return [
            PlannedSample(prompts[i], n, derive_seed(self.config.seed, "rollout", step, i, n), i)
            for i in indices
            for n in range(self.grpo.num_samples_per_prompt_rollout)
        ]

    def sample(
        self,
        policy: Policy,
        tokenizer: Any,
        wanted: Sequence[PlannedSample],
        finished: OnCompletion,
    ) -> None:
        """Sample rollouts; ``finished(place, completion)`` is called for each as it ends."""
        grpo = self.grpo
        params = SamplingParams(
            temperature=grpo.temperature,
            top_p=grpo.top_p,
            max_new_tokens=grpo.response_length,
            stop_strings=grpo.stop_strings,
        )
        sample_answers(policy, wanted, params, finished, context=grpo.max_token_length)

    def read(self, tokenizer: Any, wanted: PlannedSample, completion: Completion) -> RolloutSample:
        """A completion with its text."""
        text = completion_text(tokenizer, completion)
        return sampled(wanted, completion, text, closing_ids(tokenizer, completion))

    def rewards(self, *, patient: bool) -> RewardStream | None:
        """Reward stream of a batch while it is sampled, on rank 0; None if rewards cannot
        stream."""
        assert self._judge is not None
        return RewardStream(self.config.reward, self._judge, patient=patient)

    def ask(self, rewards: RewardStream, samples: Mapping[int, RolloutSample]) -> None:
        """Submit samples, by place, to a streaming judge."""
        for place, sample in samples.items():
            rewards.add(place, RewardInput(sample.prompt, sample.text, sample.stopped))

    def results(
        self,
        rewards: RewardStream | None,
        samples: Sequence[RolloutSample],
        on_judged: Callable[[int, int], None],
    ) -> list[RewardResult]:
        """The rewards of a batch; raises if too many samples have none."""
        rewards = rewards or self.rewards(patient=True)
        assert rewards is not None
        self.ask(rewards, dict(enumerate(samples)))
        results = rewards.results(on_judged)
        require_scored(results, self.config.judge.max_failed_share, of="rollouts of a step")
        return results

    def groups(
        self, samples: Sequence[RolloutSample], results: Sequence[RewardResult]
    ) -> RolloutBatch:
        """Advantages within groups."""
        return form_groups(
            samples,
            results,
            size=self.grpo.num_samples_per_prompt_rollout,
            normalization=self.grpo.advantage_normalization_type,
        )

    def metrics(self, batch: Any) -> dict[str, float]:
        """Metrics of a step's rollouts."""
        return rollout_metrics(batch)

    def rows(self, step: int, batch: Any) -> list[dict[str, Any]]:
        """Stored rows of a step's rollouts."""
        return rollout_rows(step, batch)

    def attempts(self, batch: Any) -> Attempts:
        """Attempts and successes of the step, by task."""
        return {}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Restore counters from a checkpoint's progress."""

    def count(self, progress: dict[str, Any], attempts: Attempts) -> None:
        """Add a step's attempts to the progress."""

    def report(self) -> dict[str, Any]:
        """Additional entries of the report."""
        return {}


def sampled(
    wanted: PlannedSample, completion: Completion, text: str, closing: tuple[int, ...] = ()
) -> RolloutSample:
    """A :class:`RolloutSample` from the request and its completion."""
    return RolloutSample(
        wanted.prompt_index, wanted.number, wanted.prompt, completion, text, closing
    )


def longest_of(turn_task: SingleTurnTask, prompts: Sequence[PromptRow], grpo: GrpoConfig) -> int:
    """The most tokens of one of these prompts and its rollout together."""
    longest = max(len(row.prompt_ids) for row in prompts) + turn_task.longest
    return min(longest, grpo.max_token_length)
