"""Credit: what the tokens of an episode are pushed by.

In: a group's episodes and their rewards. Out: an :class:`EpisodeBatch`, whose samples carry loss on
the model's own tokens alone.

``trajectory``: all own tokens of an episode have its advantage within the group, as in GRPO with a
single answer. What earned the reward is not told apart from what stood beside it.

``turn_rewards``: process supervision as in DeepSeekMath (Shao et al. 2024, section 4.1.3), with
turns as steps and progress in place of a learnt reward model. The reward of turn t is

::

    r_t = alpha x (progress_t - progress_{t-1})          before the last turn
    r_T = total - alpha x progress_{T-1}                 the last one

where ``progress`` is the partial score of the checks as they stand then and ``total`` the shaped
reward, so that the rewards of an episode add up to its total but for what was done before it began
(``total - alpha x progress_0``). An episode that is worth nothing by rule (its last turn is no tool
call) gives back in its last turn what it was credited with before. Rewards are normalised by mean
and deviation over *all turns of the group*, and a turn's advantage is the sum of the normalised
rewards from it on. What follows, and is not hidden: a reward of nothing is below the mean where
others earn, so every further turn costs; and a group of equal episodes still has spread among its
turns. It is a rule of credit, not an estimate of each turn's value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from refiner_core.contract.config import GrpoConfig
from refiner_core.contract.types import Completion, RewardResult
from refiner_core.environments.record import EpisodeRecord
from refiner_core.training.rollouts.advantages import (
    GroupAdvantages,
    Normalization,
    equal_rewards,
    group_advantages,
    normalized,
)
from refiner_core.training.rollouts.rollout import RolloutBatch, Sampled, TrainSample

#: Advantages of an episode's turns, in order.
TurnAdvantages = tuple[float, ...]


@dataclass(frozen=True)
class EpisodeBatch(RolloutBatch):
    """A step's episodes. ``records`` and ``turns`` have one entry per sample (``turns`` None with
    credit by trajectory, and where a sample takes no part), ``weights`` one per group: the
    curriculum's factor, which is in the advantages already."""

    records: tuple[EpisodeRecord, ...] = ()
    turns: tuple[TurnAdvantages | None, ...] = ()
    weights: tuple[float, ...] = ()

    def train_samples(self, *, mask_truncated: bool) -> list[TrainSample]:
        """Episodes of kept groups that have a reward and own tokens. Those that begin with the same
        tokens stand together, so that packs read these once; groups stay whole."""
        size = len(self.samples) // len(self.groups)
        kept: list[TrainSample] = []
        for i, (rollout, advantage) in enumerate(zip(self.samples, self.advantages, strict=True)):
            if self.groups[i // size].dropped or advantage is None:
                continue
            if mask_truncated and not rollout.stopped:
                continue
            if any(own_tokens(rollout.completion)):
                kept.append(self._train_sample(i, rollout, advantage, i // size))
        first: dict[tuple[int, ...], int] = {}
        for sample in kept:
            first.setdefault(sample.prompt_ids, len(first))
        return sorted(kept, key=lambda sample: first[sample.prompt_ids])

    def _train_sample(self, i: int, sample: Sampled, advantage: float, group: int) -> TrainSample:
        completion, turns = sample.completion, self.turns[i]
        return TrainSample(
            sample.prompt.prompt_ids,
            completion.token_ids,
            sampled_logprobs(self.records[i], completion),
            advantage,
            loss_mask=own_tokens(completion),
            advantages=None
            if turns is None
            else spread_over_tokens(self.records[i], completion, turns),
            group=group,
        )


def own_tokens(completion: Completion) -> tuple[bool, ...]:
    """Which tokens the model has sampled."""
    if completion.own is None:
        return (True,) * len(completion.token_ids)
    return completion.own


def sampled_logprobs(record: EpisodeRecord, completion: Completion) -> tuple[float, ...]:
    """Log-probabilities to hold the trainer's own against: NaN in turns that were repaired.
    Those were decoded greedily, so what stands there is not what they were sampled with; they carry
    loss like all own tokens, without correction for who sampled them."""
    logprobs = list(completion.logprobs)
    for turn in record.turns:
        if turn.repaired is not None:
            logprobs[turn.start : turn.end] = [math.nan] * (turn.end - turn.start)
    return tuple(logprobs)


def form_episode_groups(
    samples: Sequence[Sampled],
    results: Sequence[RewardResult],
    records: Sequence[EpisodeRecord],
    grpo: GrpoConfig,
    *,
    alpha: Callable[[str], float],
    weight: Callable[[str], float],
) -> EpisodeBatch:
    """Advantages within each task's samples.

    ``alpha(domain)`` is what partial credit counts there, ``weight(sample_id)`` the factor on a
    task's advantages, which comes after the statistics of its group.
    """
    size = grpo.num_samples_per_prompt_rollout
    normalization = grpo.advantage_normalization_type
    groups: list[GroupAdvantages] = []
    turns: list[TurnAdvantages | None] = []
    weights: list[float] = []
    for at in range(0, len(samples), size):
        members = range(at, at + size)
        factor = weight(samples[at].prompt.sample_id)
        if grpo.credit == "turn_rewards":
            rewards = [
                turn_rewards(records[i], results[i].total, alpha(records[i].domain))
                for i in members
            ]
            group, of_turns = group_turn_advantages(rewards, normalization)
        else:
            group = group_advantages([results[i].total for i in members], normalization)
            of_turns = [None] * size
        groups.append(_weighted(group, factor))
        turns += [None if t is None else tuple(factor * a for a in t) for t in of_turns]
        weights.append(factor)
    return EpisodeBatch(
        tuple(samples), tuple(results), tuple(groups), tuple(records), tuple(turns), tuple(weights)
    )


def _weighted(group: GroupAdvantages, factor: float) -> GroupAdvantages:
    if factor == 1.0:
        return group
    values = tuple(None if value is None else factor * value for value in group.values)
    return GroupAdvantages(values, group.dropped)


def turn_rewards(record: EpisodeRecord, total: float | None, alpha: float) -> list[float] | None:
    """The rewards of an episode's turns; None where it has no reward.

    A turn after which the environment told no progress (the task has no checks) has made none.
    """
    if total is None:
        return None
    known = record.first_progress or 0.0
    rewards = []
    for i, turn in enumerate(record.turns):
        if i == len(record.turns) - 1:
            rewards.append(total - alpha * known)
            break
        now = known if turn.progress is None else turn.progress
        rewards.append(alpha * (now - known))
        known = now
    return rewards


def group_turn_advantages(
    rewards: Sequence[Sequence[float] | None], normalization: Normalization = "standard"
) -> tuple[GroupAdvantages, list[TurnAdvantages | None]]:
    """Advantages of the turns of one group's episodes, from their rewards.

    The group's own values are those of first turns: what the whole of an episode was worth.
    """
    scored = [episode for episode in rewards if episode is not None]
    flat = np.array([reward for episode in scored for reward in episode], dtype=np.float64)
    if len(scored) < 2 or not len(flat):
        return GroupAdvantages((None,) * len(rewards), "too_few_scored"), [None] * len(rewards)
    if equal_rewards(flat):
        values = tuple(None if episode is None else 0.0 for episode in rewards)
        none = [None if episode is None else (0.0,) * len(episode) for episode in rewards]
        return GroupAdvantages(values, "zero_std"), none
    left = iter(normalized(flat, normalization).tolist())
    turns: list[TurnAdvantages | None] = []
    for episode in rewards:
        if episode is None:
            turns.append(None)
            continue
        own = [next(left) for _ in episode]
        turns.append(tuple(accumulate(reversed(own)))[::-1])
    values = tuple(None if t is None else t[0] if t else 0.0 for t in turns)
    return GroupAdvantages(values), turns


def spread_over_tokens(
    record: EpisodeRecord, completion: Completion, turns: TurnAdvantages
) -> tuple[float, ...]:
    """One value per token of the completion: that of the turn which it belongs to, 0 between.

    Raises
    ------
    ValueError
        An own token stands outside all turns: record and tokens are not of one episode.
    """
    values = [0.0] * len(completion.token_ids)
    within = [False] * len(values)
    for turn, advantage in zip(record.turns, turns, strict=True):
        length = turn.end - turn.start
        values[turn.start : turn.end] = [advantage] * length
        within[turn.start : turn.end] = [True] * length
    own = own_tokens(completion)
    if len(values) != len(own) or any(
        mine and not inside for mine, inside in zip(own, within, strict=True)
    ):
        raise ValueError(f"{record.task_id}: tokens of the model's own stand outside its turns")
    return tuple(values)
