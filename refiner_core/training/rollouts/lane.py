"""Lanes of rollouts: an answer to a prompt, or an episode of a task.

In: the recipe. Out: a :class:`Lane`, which samples, rewards, groups, counts and writes rollouts.
Everything else about a GRPO step is the same for both: when what is sampled, what is in flight, the
update, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from refiner_core.contract.config import GrpoConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, UnsupportedError
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.sections.environment import alpha_of, check_domains
from refiner_core.contract.types import (
    Completion,
    Judge,
    OnCompletion,
    PromptRow,
    RewardResult,
    SamplingParams,
)
from refiner_core.environments.episodes import settings_of
from refiner_core.environments.protocol import Environment, domain_of_id, task_of_row
from refiner_core.environments.registry import open_environment
from refiner_core.environments.scoring import Curriculum, require_episodes, shaped_reward
from refiner_core.generation.completions import closing_ids, completion_text
from refiner_core.rewards import RewardInput, RewardStream, require_scored
from refiner_core.samples import (
    Wanted,
    check_room,
    sample_answers,
    sample_episodes,
)
from refiner_core.training.rollouts.episodes import (
    EPISODE_COUNTS,
    EPISODE_CURVES,
    EpisodeBatch,
    attempts,
    check_progress,
    episode_metrics,
    episode_rows,
    form_episode_groups,
    record_of,
)
from refiner_core.training.rollouts.policies import Policy
from refiner_core.training.rollouts.rollout import (
    RolloutBatch,
    Sampled,
    form_groups,
    rollout_metrics,
    rollout_rows,
)

#: Attempts and successes by task.
Attempts = Mapping[str, tuple[int, int]]
#: Where the counters of tasks stand in the progress.
PROGRESS = "curriculum"


class Lane:
    """One prompt, one answer. Rank 0's has what rewards; the others' sample alone."""

    #: Counts and curves that a report keeps beside the usual ones.
    counts: tuple[str, ...] = ()
    curves: tuple[str, ...] = ()

    def __init__(self, config: RecipeConfig, judge: Judge | None) -> None:
        self.config, self.grpo, self._judge = config, config.grpo, judge

    def check(self, prompts: Sequence[PromptRow]) -> None:
        """Refuse, before anything is sampled, prompts that do not fit."""
        check_lengths(prompts, self.grpo)

    @property
    def longest(self) -> int:
        """Most tokens that a rollout can have sampled."""
        return self.grpo.response_length

    def wanted(
        self, prompts: Sequence[PromptRow], step: int, indices: Sequence[int]
    ) -> list[Wanted]:
        """All samples of some prompts in a step, prompt by prompt."""
        return [
            Wanted(prompts[i], n, derive_seed(self.config.seed, "rollout", step, i, n), i)
            for i in indices
            for n in range(self.grpo.num_samples_per_prompt_rollout)
        ]

    def sample(
        self, policy: Policy, tokenizer: Any, wanted: Sequence[Wanted], finished: OnCompletion
    ) -> None:
        """Sample rollouts; ``finished(place, completion)`` is told of each as it ends."""
        grpo = self.grpo
        params = SamplingParams(
            temperature=grpo.temperature,
            top_p=grpo.top_p,
            max_new_tokens=grpo.response_length,
            stop_strings=grpo.stop_strings,
        )
        sample_answers(policy, wanted, params, finished, context=grpo.max_token_length)

    def read(self, tokenizer: Any, wanted: Wanted, completion: Completion) -> Sampled:
        """A completion with its text."""
        text = completion_text(tokenizer, completion)
        return _sampled(wanted, completion, text, closing_ids(tokenizer, completion))

    def rewards(self, *, patient: bool) -> RewardStream | None:
        """Rewards of a batch while it is sampled (rank 0's); None where nothing can."""
        assert self._judge is not None
        return RewardStream(self.config.reward, self._judge, patient=patient)

    def ask(self, rewards: RewardStream, samples: Mapping[int, Sampled]) -> None:
        """Let a judge that streams begin with samples, by place."""
        for place, sample in samples.items():
            rewards.add(place, RewardInput(sample.prompt, sample.text, sample.stopped))

    def results(
        self,
        rewards: RewardStream | None,
        samples: Sequence[Sampled],
        on_judged: Callable[[int, int], None],
    ) -> list[RewardResult]:
        """The rewards of a batch; refuses to train where too many have none."""
        rewards = rewards or self.rewards(patient=True)
        assert rewards is not None
        self.ask(rewards, dict(enumerate(samples)))
        results = rewards.results(on_judged)
        require_scored(results, self.config.judge.max_failed_share, of="rollouts of a step")
        return results

    def groups(self, samples: Sequence[Sampled], results: Sequence[RewardResult]) -> RolloutBatch:
        """Advantages within groups."""
        return form_groups(
            samples,
            results,
            size=self.grpo.num_samples_per_prompt_rollout,
            normalization=self.grpo.advantage_normalization_type,
        )

    def metrics(self, batch: Any) -> dict[str, float]:
        """Numbers of a step's rollouts."""
        return rollout_metrics(batch)

    def rows(self, step: int, batch: Any) -> list[dict[str, Any]]:
        """A step's rollouts as they are kept."""
        return rollout_rows(step, batch)

    def attempts(self, batch: Any) -> Attempts:
        """The step's part in the counters of tasks."""
        return {}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Take back what a checkpoint's progress holds."""

    def count(self, progress: dict[str, Any], attempts: Attempts) -> None:
        """Count a step's attempts."""

    def report(self) -> dict[str, Any]:
        """Entries of a report beside the usual ones."""
        return {}


def _sampled(
    wanted: Wanted, completion: Completion, text: str, closing: tuple[int, ...] = ()
) -> Sampled:
    return Sampled(wanted.prompt_index, wanted.number, wanted.prompt, completion, text, closing)


def check_lengths(prompts: Sequence[PromptRow], grpo: GrpoConfig) -> None:
    """Refuse, before anything is sampled, prompts that leave no room or would not fit a pack.

    Raises
    ------
    ConfigurationError
        Names the field to change.
    """
    longest = check_room(prompts, grpo)
    length = len(longest.prompt_ids)
    limit = min(grpo.response_length, grpo.max_token_length - length)
    packed = length + limit + bool(grpo.stop_strings)  # a token may be appended after a stop string
    if packed > grpo.pack_length:
        raise ConfigurationError(
            f"Prompt {longest.sample_id} ({length} tokens) and {limit} sampled tokens do not fit "
            f"in grpo.pack_length={grpo.pack_length}",
            expected="packs as long as the longest prompt with its response",
            fix=f"set grpo.pack_length={packed} or more",
        )


def longest_of(lane: Lane, prompts: Sequence[PromptRow], grpo: GrpoConfig) -> int:
    """Most tokens that one of these prompts and what is sampled for it can have."""
    longest = max(len(row.prompt_ids) for row in prompts) + lane.longest
    return min(longest, grpo.max_token_length)


class EpisodeLane(Lane):
    """Tasks and episodes, with counters of attempts by task that are part of the progress.

    Parameters
    ----------
    environment
        The one to use; None opens the recipe's, where this rank ``samples``.

    Raises
    ------
    UnsupportedError
        The environment asks a judge, which rank 0 alone has, and every rank samples.
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
                    expected="one training process, or rollout servers, from which it samples",
                    fix="set grpo.nproc_per_node=1, grpo.generation_backend=vllm, or "
                    "environment.nl_assertions=exclude",
                )
            self.environment = open_environment(config, evaluation=False, judge=judge)
        self.curriculum = Curriculum(config.grpo.curriculum)

    def check(self, prompts: Sequence[PromptRow]) -> None:
        """Refuse, before anything is sampled, rows that are no tasks or leave no room; and see
        :func:`~refiner_core.training.rollouts.episodes.check_progress`."""
        for row in prompts:
            task_of_row(row)
        check_room(prompts, self.grpo)
        if self.environment is not None and not self.config.environment.domains:
            # the data stage has said so too, but is skipped where its outputs are there already
            check_domains(self.config.environment.shaping, self.environment.domains())
        if self.environment is not None and self.grpo.credit == "turn_rewards":
            check_progress(self.environment, prompts)

    @property
    def longest(self) -> int:
        """Most tokens that the model can sample in one episode."""
        longest = self.grpo.response_length * self.config.environment.max_turns
        return min(self.grpo.max_token_length, longest)

    def sample(
        self, policy: Policy, tokenizer: Any, wanted: Sequence[Wanted], finished: OnCompletion
    ) -> None:
        """Run episodes; ``finished(place, completion)`` is told of each as it ends."""
        assert self.environment is not None, "this rank samples nothing"
        temperature, top_p = self.grpo.temperature, self.grpo.top_p
        settings = settings_of(self.config, self.environment, temperature=temperature, top_p=top_p)
        sample_episodes(
            *(policy, wanted, self.environment, tokenizer, settings, finished),
            should_stop=policy.cancelled,
        )

    def read(self, tokenizer: Any, wanted: Wanted, completion: Completion) -> Sampled:
        """An episode with its text: all that was said in it, by whomever."""
        text: str = tokenizer.decode(
            list(completion.token_ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return _sampled(wanted, completion, text)

    def rewards(self, *, patient: bool) -> None:
        """Nothing is asked: the environment has said rewards already."""

    def results(
        self,
        rewards: RewardStream | None,
        samples: Sequence[Sampled],
        on_judged: Callable[[int, int], None],
    ) -> list[RewardResult]:
        """Rewards of the environment, shaped; refuses where errors ended too many episodes."""
        environment = self.config.environment
        results = [shaped_reward(record_of(sample), environment) for sample in samples]
        require_episodes(results, environment.max_error_share, of="episodes of a step")
        return results

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
        return Lane(config, judge)
    return EpisodeLane(config, judge, environment, samples=samples)
