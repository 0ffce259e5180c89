"""Sampling for all stages: answers to prompts, or episodes of tasks.

In: requested samples (:class:`PlannedSample`), and a generator. Out: completions as they end.
Training, rejection sampling and evaluation sample through this module only, so that rewards and
evaluations see the same kind of text. Rejection sampling and evaluations use the batches of
:mod:`refiner_core.batches`; training has its own pipeline (:mod:`refiner_core.training`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from refiner_core.contract.config import GrpoConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    Generator,
    Judge,
    JudgeUsage,
    OnCompletion,
    Progress,
    PromptRow,
    SamplingParams,
    StageIO,
    TurnGenerator,
)
from refiner_core.judges.context import usage_between, usage_of, usage_sum

if TYPE_CHECKING:
    from refiner_core.environments.episode_runner import EpisodeSettings
    from refiner_core.environments.protocol import Environment


class PlannedSample(NamedTuple):
    """One sample of a prompt: its number among the prompt's samples, and its seed.
    ``prompt_index`` is the prompt's place among all, if needed."""

    prompt: PromptRow
    number: int
    seed: int
    prompt_index: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Id of the prompt, and number of the sample."""
        return self.prompt.sample_id, self.number


def check_fit(prompts: Sequence[PromptRow], grpo: GrpoConfig) -> PromptRow:
    """Refuse prompts that leave no space for an answer; returns the longest prompt.

    Raises
    ------
    ConfigurationError
        The message names the prompt and the field.
    """
    longest = max(prompts, key=lambda row: len(row.prompt_ids))
    if len(longest.prompt_ids) >= grpo.max_token_length:
        raise ConfigurationError(
            f"Prompt {longest.sample_id} has {len(longest.prompt_ids)} tokens, which leaves no "
            f"space in grpo.max_token_length={grpo.max_token_length}",
            expected="space for at least one sampled token",
            fix="raise grpo.max_token_length, or lower data.max_prompt_token_length",
        )
    return longest


def sample_answers(
    generator: Generator,
    wanted: Sequence[PlannedSample],
    params: SamplingParams,
    finished: OnCompletion,
    *,
    context: int | None = None,
) -> None:
    """Sample one completion for each; calls ``finished(place, completion)`` as each ends.

    With a ``context``, a prompt so long that ``params.max_new_tokens`` would exceed it gets the
    remaining space; requests with the same limit are sampled in one call.
    """
    by_limit: dict[int, list[int]] = defaultdict(list)
    for place, one in enumerate(wanted):
        room = params.max_new_tokens if context is None else context - len(one.prompt.prompt_ids)
        by_limit[min(params.max_new_tokens, room)].append(place)
    told = 0
    for limit, places in sorted(by_limit.items()):

        def ended(i: int, completion: Completion, at: Sequence[int] = places) -> None:
            nonlocal told
            told += 1
            finished(at[i], completion)

        requests = [GenerationRequest(wanted[i].prompt.prompt_ids, wanted[i].seed) for i in places]
        generator.generate(requests, replace(params, max_new_tokens=limit), ended)
    if told != len(wanted):
        raise RuntimeError(f"the generator told of {told} of {len(wanted)} samples")


def sample_episodes(
    generator: Generator | TurnGenerator,
    wanted: Sequence[PlannedSample],
    environment: Environment,
    tokenizer: Any,
    settings: EpisodeSettings,
    finished: OnCompletion,
    *,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Run one episode of each task; calls ``finished(place, completion)`` as each ends."""
    from refiner_core.environments.episode_runner import EpisodeRequest
    from refiner_core.environments.episodes import run_episodes
    from refiner_core.environments.protocol import task_of_row

    run_episodes(
        *(generator, environment, tokenizer),
        [EpisodeRequest(task_of_row(w.prompt), w.prompt.prompt_ids, w.seed) for w in wanted],
        *(settings, finished),
        should_stop=should_stop,
    )


def judge_meter(
    judge: Judge | None, before: JudgeUsage | None = None
) -> Callable[[], JudgeUsage | None]:
    """A function that returns a judge's usage for a stage from now on; None if it keeps no count.
    ``before`` is its usage in earlier attempts of the stage."""
    at_start = None if judge is None else usage_of(judge)

    def usage() -> JudgeUsage | None:
        now = None if judge is None else usage_of(judge)
        if at_start is None or now is None:
            return before
        used = usage_between(at_start, now)
        return usage_sum(before, used) if before else used

    return usage


#: Starts servers of a fixed model for its tokenizer, sequences of at most so many tokens, and a
#: callback as :meth:`BatchReporter.step`; its block ends them.
OpenServers = Callable[
    [Any, int, Callable[[int, int], None]], AbstractContextManager[Generator | TurnGenerator]
]


class BatchReporter:
    """``unit`` names the elements of a batch in the plural: samples, attempts."""

    def __init__(self, io: StageIO, total: int, unit: str) -> None:
        self.io, self.total, self._unit = io, total, unit
        self._done, self._phase = 0, ""
        self._last_s = time.monotonic()

    def batch(self, done: int, phase: str) -> None:
        """``done`` batches are finished; ``phase`` begins."""
        self._done, self._phase = done, phase
        self.io.progress(Progress(done=done, total=self.total, phase=phase))

    def step(self, finished: int, asked: int) -> None:
        """Report progress of decoding within the batch."""
        self._within(f"{self._unit}_finished", finished, self._unit, asked)

    def turn(self, finished: int, turns: int) -> None:
        """Report progress of an agent's turns, all that a generator knows."""
        self._within("turns_finished", finished, "turns", turns)

    def judged(self, judged: int, asked: int) -> None:
        """Report progress of judging the previous batch."""
        self._within(f"{self._unit}_judged", judged, self._unit, asked)

    def _within(self, what: str, count: int, of: str, all_of_them: int) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < 1.0:
            return
        self._last_s = now_s
        values = {what: float(count), of: float(all_of_them)}
        self.io.progress(Progress(self._done, self.total, self._phase, values))
