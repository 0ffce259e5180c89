"""Episodes as rollouts: sampled, rewarded, counted and stored.

In: prepared tasks, a policy that samples turns, an environment. Out: the same as for single answers
(:mod:`refiner_core.training.rollouts.rollout`), so that one pipeline handles both: completions
with a mask of own tokens and a record, rewards, metrics, and rows of rollouts.

An episode's seed is ``derive_seed(run seed, "rollout", step, prompt, sample)``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refiner_core.contract.config import GrpoConfig, RecipeConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.sections.environment import check_settings
from refiner_core.contract.types import (
    Completion,
    Judge,
    OnCompletion,
    PromptRow,
    RewardResult,
    SamplingParams,
)
from refiner_core.environments.episodes import settings_of
from refiner_core.environments.protocol import (
    FAILURES,
    Environment,
    EpisodeRecord,
    domain_of_id,
    record_from_json,
    task_of_row,
)
from refiner_core.environments.registry import open_environment
from refiner_core.environments.scoring import (
    Curriculum,
    require_episodes,
    shaped_reward,
)
from refiner_core.rewards import RewardStream
from refiner_core.samples import PlannedSample, check_fit, sample_episodes
from refiner_core.training.rollouts.policies import Policy
from refiner_core.training.rollouts.rollout import (
    GroupAdvantages,
    RolloutBatch,
    RolloutSample,
    TrainSample,
    batch_metrics,
    form_groups,
    means,
    own_tokens,
    rollout_rows,
)
from refiner_core.training.rollouts.single_turn import Attempts, SingleTurnTask, sampled


@dataclass(frozen=True)
class EpisodeBatch(RolloutBatch):
    """A step's episodes. ``records`` has one entry per sample, ``weights`` one per group: the
    curriculum's factor, already applied to the advantages."""

    records: tuple[EpisodeRecord, ...] = ()
    weights: tuple[float, ...] = ()

    def train_samples(self, *, mask_truncated: bool) -> list[TrainSample]:
        """Episodes of kept groups that have a reward and own tokens. Episodes with a common prefix
        are adjacent, so that packs compute it once; groups stay whole."""
        size = len(self.samples) // len(self.groups)
        kept = [
            self._train_sample(i, sample, advantage, i // size)
            for i, sample, advantage in self.trained(mask_truncated=mask_truncated)
            if any(own_tokens(sample.completion))
        ]
        first: dict[tuple[int, ...], int] = {}
        for sample in kept:
            first.setdefault(sample.prompt_ids, len(first))
        return sorted(kept, key=lambda sample: first[sample.prompt_ids])

    def _train_sample(
        self, i: int, sample: RolloutSample, advantage: float, group: int
    ) -> TrainSample:
        completion = sample.completion
        return TrainSample(
            sample.prompt.prompt_ids,
            completion.token_ids,
            sampled_logprobs(self.records[i], completion),
            advantage,
            loss_mask=own_tokens(completion),
            group=group,
        )


def sampled_logprobs(record: EpisodeRecord, completion: Completion) -> tuple[float, ...]:
    """The sampler's log-probabilities; NaN in repaired turns. Those were decoded greedily, so their
    log-probabilities are not those of the sampling; they carry loss like all own tokens, without
    importance weights."""
    logprobs = list(completion.logprobs)
    for turn in record.turns:
        if turn.repaired is not None:
            logprobs[turn.start : turn.end] = [math.nan] * (turn.end - turn.start)
    return tuple(logprobs)


def form_episode_groups(
    samples: Sequence[RolloutSample],
    results: Sequence[RewardResult],
    records: Sequence[EpisodeRecord],
    grpo: GrpoConfig,
    weight: Callable[[str], float],
) -> EpisodeBatch:
    """Advantages within each task's samples. ``weight(sample_id)`` is the factor on a task's
    advantages, applied after the statistics of its group."""
    size, kind = grpo.num_samples_per_prompt_rollout, grpo.advantage_normalization_type
    plain = form_groups(samples, results, size=size, normalization=kind)
    weights = tuple(weight(sample.prompt.sample_id) for sample in samples[::size])
    groups = [
        GroupAdvantages(tuple(v if v is None else w * v for v in group.values), group.dropped)
        for w, group in zip(weights, plain.groups, strict=True)
    ]
    return EpisodeBatch(plain.samples, plain.results, tuple(groups), tuple(records), weights)


#: Counts of a step that the report sums.
EPISODE_COUNTS = (
    "episodes/successes",
    "episodes/errors",
    "episodes/excluded",
    "episodes/repairs",
    "episodes/tool_errors",
)
#: Further metrics whose curves the report keeps.
EPISODE_CURVES = ("episodes/success", "episodes/turns")


def record_of(sample: RolloutSample) -> EpisodeRecord:
    """The record of an episode's sample."""
    if sample.completion.episode is None:
        raise ValueError(f"{sample.prompt.sample_id}: a completion without the record of a task")
    return record_from_json(sample.completion.episode)


# ---------------------------------------------------------------- metrics and rows


def attempts(batch: EpisodeBatch) -> dict[str, tuple[int, int]]:
    """Attempts and successes of a step, by task. Infrastructure errors are no attempts; episodes
    that are excluded from training on purpose are."""
    found: dict[str, tuple[int, int]] = {}
    for sample, record in zip(batch.samples, batch.records, strict=True):
        if record.status == "finished":
            tried, solved = found.get(sample.prompt.sample_id, (0, 0))
            found[sample.prompt.sample_id] = (tried + 1, solved + record.success)
    return found


def episode_metrics(batch: EpisodeBatch) -> dict[str, float]:
    """Metrics of a step's episodes. Rates and means of outcomes are over those with an outcome;
    turns and tokens over all. ``val/stop_rate``: share not ended by a limit of turns or context."""
    records = batch.records
    ended = [record for record in records if record.status == "finished"]
    own = [sum(own_tokens(sample.completion)) for sample in batch.samples]
    foreign = [len(s.completion.token_ids) - n for s, n in zip(batch.samples, own, strict=True)]
    turns = [turn for record in records for turn in record.turns]
    failures = Counter(record.failure for record in ended)
    errors = Counter(r.error_kind or "error" for r in records if r.status == "error")
    tool_errors = Counter(turn.tool_error for turn in turns if turn.tool_error)
    metrics: dict[str, float] = {
        **batch_metrics(batch),
        "episodes/turns": len(turns) / len(records),
        "episodes/own_tokens": sum(own) / len(records),
        "episodes/foreign_tokens": sum(foreign) / len(records),
        "episodes/successes": sum(record.success for record in ended),
        "episodes/errors": errors.total(),
        "episodes/excluded": sum(r.status == "unscored" for r in batch.results) - errors.total(),
        "episodes/repairs": sum(turn.tried_again for turn in turns),
        "episodes/tool_errors": tool_errors.total(),
        "episodes/turn_limit": sum(record.ended == "turn_limit" for record in records),
        "episodes/context_limit": sum(record.ended == "context_limit" for record in records),
        "time/tools_s": sum(turn.seconds for turn in turns),
        **{f"episodes/failed/{name}": failures[name] for name in FAILURES},
        **{f"episodes/tool_errors/{name}": n for name, n in sorted(tool_errors.items())},
    }
    metrics |= {f"episodes/errors/{kind}": n for kind, n in sorted(errors.items())}
    metrics.update(means(_outcomes(ended)))
    parts = (pair for result in batch.results for pair in result.components.items())
    metrics.update(
        means(
            (f"objective/{name}_reward", value)
            for name, value in parts
            if name.startswith("environment_")
        )
    )
    if any(weight != 1.0 for weight in batch.weights):
        metrics["curriculum/weight"] = sum(batch.weights) / len(batch.weights)
    return metrics


def _outcomes(ended: Sequence[EpisodeRecord]) -> Iterator[tuple[str, float]]:
    """Success, reward and partial score of each episode, overall and by domain."""
    for record in ended:
        found = {"success": record.success, "reward": record.reward, "partial": record.partial}
        for name, value in found.items():
            if value is not None:
                yield f"episodes/{name}", value
                yield f"episodes/{name}/{record.domain}", value


def episode_rows(step: int, batch: EpisodeBatch) -> list[dict[str, Any]]:
    """One row per episode: the columns of single answers, plus ``own`` (mask of the model's
    tokens), ``episode`` (the record as JSON, without durations, which are not reproducible) and
    ``curriculum_weight``. A log-probability is None if the model did not sample the token."""
    rows = rollout_rows(step, batch)
    size = len(batch.samples) // len(batch.groups)
    for i, (row, sample) in enumerate(zip(rows, batch.samples, strict=True)):
        row["logprobs"] = [None if math.isnan(p) else p for p in sample.completion.logprobs]
        row["own"] = list(own_tokens(sample.completion))
        row["episode"] = json.dumps(_without_durations(sample), ensure_ascii=False)
        row["curriculum_weight"] = batch.weights[i // size]
    return rows


def _without_durations(sample: RolloutSample) -> dict[str, Any]:
    values = dict(sample.completion.episode or {})
    values["turns"] = [{**turn, "seconds": 0.0} for turn in values["turns"]]
    return values


#: Key of the task counters in the progress.
PROGRESS = "curriculum"


class MultiTurnTask(SingleTurnTask):
    """Tasks and episodes, with counters of attempts by task that are part of the progress.

    Parameters
    ----------
    environment
        The environment to use; None opens the recipe's, if this rank ``samples``.

    Raises
    ------
    UnsupportedError
        The environment needs a judge, which only rank 0 has, but every rank samples.
    """

    counts = EPISODE_COUNTS
    curves = EPISODE_CURVES

    def __init__(
        self,
        config: RecipeConfig,
        judge: Judge | None,
        environment: Environment | None,
        *,
        samples: bool,
    ) -> None:
        super().__init__(config, judge)
        self.environment = environment
        if environment is None and samples:
            if judge is None and config.environment.nl_assertions == "judge":
                raise UnsupportedError(
                    "environment.nl_assertions is judge, and this process samples episodes "
                    "without a judge: one process of a stage has it",
                    expected="one training process, or rollout servers",
                    fix="set grpo.nproc_per_node=1, grpo.generation_backend=vllm, or "
                    "environment.nl_assertions=exclude",
                )
            self.environment = open_environment(config, evaluation=False, judge=judge)
        self.curriculum = Curriculum(config.grpo.curriculum)

    def check(self, prompts: Sequence[PromptRow]) -> None:
        """Refuse, before any sampling, rows that are no tasks or leave no space for tokens."""
        for row in prompts:
            task_of_row(row)
        check_fit(prompts, self.grpo)
        if self.environment is not None and not self.config.environment.domains:
            # the data stage checks this too, but is skipped if its outputs exist
            check_settings(self.config.environment.shaping, self.environment.domains())

    @property
    def longest(self) -> int:
        """Most tokens that the model can sample in one episode."""
        longest = self.grpo.response_length * self.config.environment.max_turns
        return min(self.grpo.max_token_length, longest)

    def sample(
        self,
        policy: Policy,
        tokenizer: Any,
        wanted: Sequence[PlannedSample],
        finished: OnCompletion,
    ) -> None:
        """Run episodes; ``finished(place, completion)`` is called for each as it ends."""
        assert self.environment is not None, "this rank samples nothing"
        sampling = SamplingParams(self.grpo.temperature, self.grpo.top_p)
        settings = settings_of(self.config, self.environment, sampling)
        sample_episodes(
            *(policy, wanted, self.environment, tokenizer, settings, finished),
            should_stop=policy.cancelled,
        )

    def read(self, tokenizer: Any, wanted: PlannedSample, completion: Completion) -> RolloutSample:
        """An episode with its text: everything said in it, by all parties."""
        text: str = tokenizer.decode(
            list(completion.token_ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return sampled(wanted, completion, text)

    def rewards(self, *, patient: bool) -> None:
        """None: the environment already gave the rewards."""

    def results(
        self,
        rewards: RewardStream | None,
        samples: Sequence[RolloutSample],
        on_judged: Callable[[int, int], None],
    ) -> list[RewardResult]:
        """Rewards of the environment, shaped; raises if errors ended too many episodes."""
        environment = self.config.environment
        records = [record_of(sample) for sample in samples]
        errors = [(r.error_kind or "error", r.error) for r in records if r.status == "error"]
        share = environment.max_error_share
        require_episodes(errors, len(records), share, of="episodes of a step")
        return [shaped_reward(record, environment) for record in records]

    def groups(
        self, samples: Sequence[RolloutSample], results: Sequence[RewardResult]
    ) -> EpisodeBatch:
        """Advantages, times the curriculum's weights before this step."""
        return form_episode_groups(
            samples,
            results,
            [record_of(sample) for sample in samples],
            self.grpo,
            self.curriculum.weight,
        )

    metrics = staticmethod(episode_metrics)
    rows = staticmethod(episode_rows)
    attempts = staticmethod(attempts)

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Restore the counters of tasks."""
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
