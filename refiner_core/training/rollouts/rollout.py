"""Rollouts of one step: prompts to completions to rewards to advantages to stored rows.

In: the step's prompts, a :class:`Generator`, a reward function and a :class:`Judge`.
Out: a :class:`RolloutBatch`, the samples that may be trained on, metrics, and rows for Parquet.
A judge that streams begins with a sample when it is finished, while others are still decoded.

Everything here is a function of (seed, step, weights): a step that is repeated after a crash
samples the same tokens. A sample that the judge could not score is not a zero; it takes no part.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from refiner_core.contract.config import GrpoConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, JudgeOutage
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    Judge,
    OnCompletion,
    PromptRow,
    RewardResult,
    SamplingParams,
)
from refiner_core.generation.completions import closing_ids, completion_text
from refiner_core.rewards import RewardInput, RewardStream

Normalization = Literal["standard", "centered", "sample_std"]
DropReason = Literal["zero_std", "too_few_scored"]

EPSILON = 1e-8
#: Rewards that differ by no more than this (relative to their size) are equal: dividing rounding
#: noise by its own deviation would make full-size advantages of nothing.
EQUAL_REWARDS = 1e-9


@dataclass(frozen=True)
class GroupAdvantages:
    """``values`` has one entry per sample; ``dropped`` says why the group is not trained on."""

    values: tuple[float | None, ...]
    dropped: DropReason | None = None


def group_advantages(
    rewards: Sequence[float | None], normalization: Normalization = "standard"
) -> GroupAdvantages:
    """Advantages of one group.

    ``standard``: (r - mean) / (population std + 1e-8), the GRPO paper's (Shao et al. 2024, eq. 2);
    ``centered``: r - mean (Liu et al. 2025, "Dr. GRPO"); ``sample_std``: with the n - 1 deviation.
    """
    scored = np.array([r for r in rewards if r is not None], dtype=np.float64)
    if len(scored) < 2:
        return GroupAdvantages((None,) * len(rewards), "too_few_scored")
    if equal_rewards(scored):
        return GroupAdvantages(tuple(None if r is None else 0.0 for r in rewards), "zero_std")
    values = iter(normalized(scored, normalization).tolist())
    return GroupAdvantages(tuple(None if r is None else float(next(values)) for r in rewards))


def equal_rewards(rewards_N: np.ndarray) -> bool:
    """Whether there is no direction in them."""
    return bool(np.ptp(rewards_N) <= EQUAL_REWARDS * max(1.0, float(np.abs(rewards_N).max())))


def normalized(rewards_N: np.ndarray, normalization: Normalization) -> np.ndarray:
    """(N,) rewards without their mean, by their deviation."""
    centred: np.ndarray = rewards_N - rewards_N.mean()
    if normalization == "standard":
        centred = centred / (rewards_N.std() + EPSILON)
    elif normalization == "sample_std":
        centred = centred / (rewards_N.std(ddof=1) + EPSILON)
    return centred


#: Components that count things in an answer. Watch claims: rewards can rise while answers say less.
COUNT_COMPONENTS = ("claims", "uncited")

RewardFunction = Callable[[Sequence[RewardInput], RewardConfig, Judge], list[RewardResult]]


class Key(NamedTuple):
    """What a sample is of: index of the prompt, index of the sample among its own, the prompt."""

    prompt_index: int
    sample_index: int
    prompt: PromptRow


class Samples(Protocol):
    """As much of a generator as sampling needs."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion,
    ) -> list[Completion]:
        """As of :meth:`refiner_core.contract.types.Generator.generate`."""
        ...


@dataclass(frozen=True)
class Sampled:
    """One completion: of which prompt, which sample of it, and what it says.

    ``closing_ids`` is the end-of-text token where the sampler stopped at a stop string, without it.
    """

    prompt_index: int
    sample_index: int
    prompt: PromptRow
    completion: Completion
    text: str
    closing_ids: tuple[int, ...] = ()

    @property
    def stopped(self) -> bool:
        """Whether it ended by itself instead of at the length limit."""
        return self.completion.finish_reason == "stop"


@dataclass(frozen=True)
class TrainSample:
    """A rollout that carries loss: tokens, the sampler's log-probabilities, the advantage.

    A log-probability is NaN where the token was not sampled but appended (``closing_ids``).
    Of an episode, ``loss_mask`` is True on the model's own tokens alone (None: everywhere),
    ``advantages`` has one value per token where turns are credited apart (None: ``advantage``
    everywhere), and ``group`` numbers its group, since groups of one domain have one prompt.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    advantage: float
    loss_mask: tuple[bool, ...] | None = None
    advantages: tuple[float, ...] | None = None
    group: int | None = None


@dataclass(frozen=True)
class RolloutBatch:
    """A step's rollouts in order of (prompt, sample); ``groups`` has one entry per prompt."""

    samples: tuple[Sampled, ...]
    results: tuple[RewardResult, ...]
    groups: tuple[GroupAdvantages, ...]

    @property
    def advantages(self) -> list[float | None]:
        """One per sample; 0 in a group without spread, None where the sample takes no part."""
        return [value for group in self.groups for value in group.values]

    def train_samples(self, *, mask_truncated: bool) -> list[TrainSample]:
        """What carries loss: kept groups, scored samples, truncated ones only if not masked.

        Masking comes after the group statistics: a truncated sample is still what its group is
        compared with.
        """
        size = len(self.samples) // len(self.groups)
        kept = []
        for i, (sample, advantage) in enumerate(zip(self.samples, self.advantages, strict=True)):
            if self.groups[i // size].dropped or advantage is None:
                continue
            if mask_truncated and not sample.stopped:
                continue
            completion, closing = sample.completion, sample.closing_ids
            if completion.token_ids:
                kept.append(
                    TrainSample(
                        sample.prompt.prompt_ids,
                        completion.token_ids + closing,
                        completion.logprobs + (math.nan,) * len(closing),
                        advantage,
                    )
                )
        return kept


class RolloutRewards(Protocol):
    """Rewards of a batch of samples, begun while others are still sampled."""

    def add(self, place: int, sample: Sampled) -> None:
        """Take a finished sample."""
        ...

    def add_all(self, samples: Sequence[Sampled]) -> None:
        """Take those that were not added yet; each stands at its place."""
        ...

    def results(
        self, samples: Sequence[Sampled], on_judged: Callable[[int, int], None]
    ) -> list[RewardResult]:
        """One reward per sample of the batch, in order."""
        ...


class Sampler(Protocol):
    """What samples the rollouts of a step, whatever a rollout is."""

    def keys(self, prompts: Sequence[tuple[int, PromptRow]]) -> list[Key]:
        """What is sampled for these (index, prompt), in order."""
        ...

    def complete(
        self, keys: Sequence[Key], places: Iterable[int], *, step: int, finished: OnCompletion
    ) -> None:
        """Sample the keys at these places; ``finished(place, completion)`` is told of each."""
        ...

    def sampled(self, key: Key, completion: Completion) -> Sampled:
        """A completion with its text."""
        ...


#: Told of a sample and its place.
OnSample = Callable[[int, Sampled], None]


@dataclass(frozen=True)
class RolloutSampler:
    """What samples the rollouts of every step. ``seed`` is the run's."""

    grpo: GrpoConfig
    seed: int
    generator: Samples
    tokenizer: Any

    def sample(
        self, prompts: Sequence[tuple[int, PromptRow]], *, step: int, on_sample: OnSample
    ) -> list[Sampled]:
        """``num_samples_per_prompt_rollout`` samples of each (index, prompt), in that order.

        ``on_sample(place, sample)`` is told of each as it finishes; its place is that in the list.
        """
        keys = self.keys(prompts)
        samples: dict[int, Sampled] = {}

        def finished(place: int, completion: Completion) -> None:
            samples[place] = self.sampled(keys[place], completion)
            on_sample(place, samples[place])

        self.complete(keys, range(len(keys)), step=step, finished=finished)
        return [samples[place] for place in range(len(keys))]

    def keys(self, prompts: Sequence[tuple[int, PromptRow]]) -> list[Key]:
        """What is sampled for these (index, prompt), in order."""
        return group_keys(prompts, self.grpo)

    def complete(
        self, keys: Sequence[Key], places: Iterable[int], *, step: int, finished: OnCompletion
    ) -> None:
        """Sample the keys at these places; ``finished(place, completion)`` is told of each.

        A prompt so long that ``response_length`` would pass ``max_token_length`` gets the room that
        is left.
        """
        by_limit: dict[int, list[int]] = defaultdict(list)
        for place in places:
            by_limit[response_limit(keys[place].prompt, self.grpo)].append(place)
        told = 0

        def count(place: int, completion: Completion) -> None:
            nonlocal told
            told += 1
            finished(place, completion)

        for limit in sorted(by_limit):
            self._generate(keys, by_limit[limit], limit, step, count)
        wanted = sum(len(group) for group in by_limit.values())
        if told != wanted:
            raise RuntimeError(f"the generator told of {told} of {wanted} samples")

    def _generate(
        self,
        keys: Sequence[Key],
        places: Sequence[int],
        limit: int,
        step: int,
        finished: OnCompletion,
    ) -> None:
        """Sample those places, at most ``limit`` tokens each."""
        grpo = self.grpo
        requests = [
            GenerationRequest(
                keys[i].prompt.prompt_ids,
                derive_seed(self.seed, "rollout", step, keys[i].prompt_index, keys[i].sample_index),
            )
            for i in places
        ]
        params = SamplingParams(
            temperature=grpo.temperature,
            top_p=grpo.top_p,
            max_new_tokens=limit,
            stop_strings=grpo.stop_strings,
        )
        self.generator.generate(requests, params, lambda i, made: finished(places[i], made))

    def sampled(self, key: Key, completion: Completion) -> Sampled:
        """A completion with its text."""
        text = completion_text(self.tokenizer, completion)
        closing = closing_ids(self.tokenizer, completion)
        return Sampled(key.prompt_index, key.sample_index, key.prompt, completion, text, closing)


def group_keys(prompts: Sequence[tuple[int, PromptRow]], grpo: GrpoConfig) -> list[Key]:
    """``num_samples_per_prompt_rollout`` samples of each (index, prompt), in that order."""
    return [
        Key(index, sample_index, prompt)
        for index, prompt in prompts
        for sample_index in range(grpo.num_samples_per_prompt_rollout)
    ]


def response_limit(prompt: PromptRow, grpo: GrpoConfig) -> int:
    """How many tokens may be sampled for this prompt."""
    return min(grpo.response_length, grpo.max_token_length - len(prompt.prompt_ids))


def check_lengths(prompts: Iterable[PromptRow], grpo: GrpoConfig) -> None:
    """Refuse, before anything is sampled, prompts that leave no room or would not fit a pack.

    Raises
    ------
    ConfigurationError
        Names the field to change.
    """
    longest = max(prompts, key=lambda row: len(row.prompt_ids))
    limit, length = response_limit(longest, grpo), len(longest.prompt_ids)
    packed = length + limit + bool(grpo.stop_strings)  # a token may be appended after a stop string
    if limit < 1:
        raise ConfigurationError(
            f"Prompt {longest.sample_id} has {length} tokens, which leaves no room in "
            f"grpo.max_token_length={grpo.max_token_length}",
            expected="room for at least one sampled token",
            fix="raise grpo.max_token_length, or lower data.max_prompt_token_length",
        )
    if packed > grpo.pack_length:
        raise ConfigurationError(
            f"Prompt {longest.sample_id} ({length} tokens) and {limit} sampled tokens do not fit "
            f"in grpo.pack_length={grpo.pack_length}",
            expected="packs as long as the longest prompt with its response",
            fix=f"set grpo.pack_length={packed} or more",
        )


class StepRewards:
    """Rewards of a batch of samples, begun while others are still sampled.

    ``rewards`` None is :class:`refiner_core.rewards.RewardStream`; a function gets all samples at
    once, in order of (prompt, sample), and so does a judge that does not stream. With ``patient``
    the judge's errors end no sampling: :meth:`results` raises them.
    """

    def __init__(
        self,
        reward: RewardConfig,
        judge: Judge,
        rewards: RewardFunction | None,
        *,
        patient: bool = False,
    ) -> None:
        self._reward, self._judge, self._rewards = reward, judge, rewards
        self._stream = RewardStream(reward, judge)
        self._patient = patient
        self._added: set[int] = set()
        self._error: JudgeOutage | Interrupted | None = None

    def add(self, place: int, sample: Sampled) -> None:
        """Take a finished sample; a judge that streams begins with it."""
        if self._rewards is not None or not self._stream.streams or self._error is not None:
            return
        self._added.add(place)
        try:
            self._stream.add(_reward_input(sample), place)
            self._stream.submit()
        except (JudgeOutage, Interrupted) as error:
            if not self._patient:
                raise
            self._error = error

    def add_all(self, samples: Sequence[Sampled]) -> None:
        """Take those that were not added yet; each stands at its place."""
        for place, sample in enumerate(samples):
            if place not in self._added:
                self.add(place, sample)

    def results(
        self, samples: Sequence[Sampled], on_judged: Callable[[int, int], None]
    ) -> list[RewardResult]:
        """One reward per sample of the batch, in order; waits for the judge."""
        if self._rewards is not None:
            return self._rewards([_reward_input(s) for s in samples], self._reward, self._judge)
        if self._stream.streams:
            self.add_all(samples)
        if self._error is not None:
            raise self._error
        if not self._stream.streams:
            for sample in samples:
                self._stream.add(_reward_input(sample))
        return self._stream.results(on_judged)


def _reward_input(sample: Sampled) -> RewardInput:
    return RewardInput(sample.prompt, sample.text, sample.stopped)


def form_groups(
    samples: Sequence[Sampled],
    results: Sequence[RewardResult],
    *,
    size: int,
    normalization: Normalization,
) -> RolloutBatch:
    """Advantages within each prompt's ``size`` samples."""
    totals = [result.total for result in results]
    groups = [
        group_advantages(totals[i : i + size], normalization) for i in range(0, len(totals), size)
    ]
    return RolloutBatch(tuple(samples), tuple(results), tuple(groups))


def rollout_rows(step: int, batch: RolloutBatch) -> list[dict[str, Any]]:
    """One row per rollout, with all that a reward can be recomputed from."""
    rows: list[dict[str, Any]] = []
    columns = sorted({name for result in batch.results for name in result.components})
    for sample, result, advantage in zip(
        batch.samples, batch.results, batch.advantages, strict=True
    ):
        rows.append(
            {
                "step": step,
                "prompt_index": sample.prompt_index,
                "sample_index": sample.sample_index,
                "sample_id": sample.prompt.sample_id,
                "response_ids": list(sample.completion.token_ids),
                "response_text": sample.text,
                "finish_reason": sample.completion.finish_reason,
                "logprobs": list(sample.completion.logprobs),
                "status": result.status,
                "reward": result.total,
                "advantage": advantage,
                **{f"reward/{name}": result.components.get(name) for name in columns},
                "judgements": json.dumps(
                    [dict(judgement) for judgement in result.judgements], ensure_ascii=False
                ),
            }
        )
    return rows


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Rewards, lengths and counts of a step. Means are over what was scored."""
    return {**batch_metrics(batch), **_component_means(batch.results)}


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """The same without the parts of rewards."""
    dropped = [group.dropped for group in batch.groups]
    lengths = [len(sample.completion.token_ids) for sample in batch.samples]
    metrics: dict[str, float] = {
        "val/sequence_lengths": _mean(lengths),
        "val/stop_rate": _mean([float(sample.stopped) for sample in batch.samples]),
        "groups/kept": dropped.count(None),
        "groups/dropped_zero_std": dropped.count("zero_std"),
        "groups/dropped_too_few_scored": dropped.count("too_few_scored"),
        "samples/unscored": sum(1 for r in batch.results if r.status == "unscored"),
        "samples/malformed": sum(1 for r in batch.results if r.status == "malformed"),
    }
    scores = [result.total for result in batch.results if result.total is not None]
    if scores:
        metrics["scores"] = _mean(scores)
    return metrics


def _component_means(results: Sequence[RewardResult]) -> dict[str, float]:
    values: Mapping[str, list[float]] = defaultdict(list)
    for result in results:
        if result.total is not None:
            for name, value in result.components.items():
                values[name].append(float(value))
    return {metric_name(name): _mean(values[name]) for name in sorted(values)}


def metric_name(component: str) -> str:
    """``objective/<component>_reward``, the name of the reference; counts go under ``val/``."""
    if component in COUNT_COMPONENTS:
        return f"val/{component}_per_answer"
    return f"objective/{component.removesuffix('_reward')}_reward"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
