"""Attempts of the refiner: answers, scored by rubrics and citations.

In: prompts, a generator, the reward configuration, a judge. Out: attempts.

An answer's score is its reward as a share of the highest that its prompt can give
(:func:`highest_reward`): without evidence in the prompt there is no citation to earn, and with
``combination: additive`` more than ``reward.verification_reward`` may be earned. The share is cut
to [0, 1] (``signed_mean`` and ``positive_sum`` go below 0). A prompt whose highest reward is 0 (no
rubric and no evidence) tells nothing: its attempts are ``no_reward`` and never kept.

All attempts of a batch are sampled in one call, so that each is decoded in the same company
whenever somebody pulls a plug; half a batch is never kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from refiner_core.answers import parse_evidence
from refiner_core.contract.config import GrpoConfig, RecipeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.seeds import derive_seed
from refiner_core.contract.types import (
    Completion,
    DemonstrationRow,
    GenerationRequest,
    Generator,
    Judge,
    PromptRow,
    RewardResult,
    SamplingParams,
)
from refiner_core.generation.text import closing_ids, completion_text
from refiner_core.rejection.attempts import Attempt
from refiner_core.rejection.lane import Begun, Keep, OnFinished, OnJudged, demonstration_id
from refiner_core.rejection.selection import Flaw
from refiner_core.rewards import RewardInput, RewardStream, require_scored
from refiner_core.rewards.combine import aggregate_rubrics, reward_terms, total_reward
from refiner_core.rubrics.select import select_rubrics


def highest_reward(prompt: PromptRow, reward: RewardConfig) -> float:
    """The most that an answer to a prompt can get: every positive rubric met and no negative one,
    every claim well cited where there is evidence, and a form without fault."""
    ideal = [
        (rubric, 0.0 if rubric.polarity == "negative" else 1.0)
        for rubric in select_rubrics(prompt.rubrics, reward=reward)
    ]
    judged = aggregate_rubrics(ideal, reward.rubric_aggregation)
    components = {
        "rubric": judged or 0.0,
        "no_rubrics": float(judged is None),
        "citation": float(bool(parse_evidence(prompt.prompt_text))),
        "format_bonus": 1.0,
    }
    best = {term.name: 1.0 for term in reward_terms(components, reward)}
    return total_reward({**best, **components}, reward, stopped=True)


def check_room(prompts: Sequence[PromptRow], grpo: GrpoConfig) -> None:
    """Refuse prompts that leave no room for an answer.

    Raises
    ------
    ConfigurationError
        Names the longest one and the field.
    """
    longest = max(prompts, key=lambda row: len(row.prompt_ids))
    if len(longest.prompt_ids) >= grpo.max_token_length:
        raise ConfigurationError(
            f"Prompt {longest.sample_id} has {len(longest.prompt_ids)} tokens, which leaves no "
            f"room in grpo.max_token_length={grpo.max_token_length}",
            expected="room for at least one sampled token",
            fix="raise grpo.max_token_length, or lower data.max_prompt_token_length",
        )


class AnswerLane:
    """Samples and scores batches of answers."""

    name = "answers"
    #: Whether attempts of a batch that was cut short may be kept.
    keeps_parts = False

    def __init__(
        self, config: RecipeConfig, judge: Judge, generator: Generator, tokenizer: Any
    ) -> None:
        self.config, self.judge = config, judge
        self.generator, self.tokenizer = generator, tokenizer

    def begin(
        self,
        prompts: Sequence[PromptRow],
        known: Sequence[Attempt],
        on_finished: OnFinished,
        should_stop: Callable[[], bool],
        keep: Keep,
    ) -> Begun:
        """Sample all attempts at these prompts, or take ``known`` ones of an earlier try; a judge
        that streams begins with each as it is finished."""
        keys = [(p, index) for p in prompts for index in range(self.config.sample.attempts)]
        stream = RewardStream(self.config.reward, self.judge)
        attempts: dict[int, Attempt] = {}

        def add(place: int, attempt: Attempt) -> None:
            attempts[place] = attempt
            row = RewardInput(keys[place][0], attempt.text, attempt.ended == "stop")
            stream.add(row, place)
            stream.submit()
            on_finished(len(attempts), len(keys))

        if known:
            for place, attempt in enumerate(known):
                add(place, attempt)
        else:
            self._sample(keys, lambda place, made: add(place, self._attempt(*keys[place], made)))
        if len(attempts) != len(keys):
            raise RuntimeError(f"the generator told of {len(attempts)} of {len(keys)} attempts")
        made = tuple(attempts[place] for place in range(len(keys)))

        def finish(on_judged: OnJudged) -> list[Attempt]:
            results = stream.results(on_judged)
            require_scored(results, self.config.judge.max_failed_share, of="attempts")
            pairs = zip(keys, made, results, strict=True)
            return [self._scored(key[0], attempt, result) for key, attempt, result in pairs]

        return Begun(made, stream.streams, finish)

    def _sample(
        self,
        keys: Sequence[tuple[PromptRow, int]],
        finished: Callable[[int, Completion], None],
    ) -> None:
        """A prompt so long that ``response_length`` would pass ``max_token_length`` gets the room
        that is left, as in training."""
        rule, grpo = self.config.sample, self.config.grpo
        by_limit: dict[int, list[int]] = defaultdict(list)
        for place, (prompt, _) in enumerate(keys):
            room = grpo.max_token_length - len(prompt.prompt_ids)
            by_limit[min(grpo.response_length, room)].append(place)
        for limit, places in sorted(by_limit.items()):
            requests = [
                GenerationRequest(keys[place][0].prompt_ids, self._seed(*keys[place]))
                for place in places
            ]
            params = SamplingParams(
                temperature=rule.temperature,
                top_p=rule.top_p,
                top_k=rule.top_k,
                max_new_tokens=limit,
                stop_strings=grpo.stop_strings,
            )

            def told(i: int, completion: Completion, at: Sequence[int] = places) -> None:
                finished(at[i], completion)

            self.generator.generate(requests, params, told)

    def _seed(self, prompt: PromptRow, index: int) -> int:
        return derive_seed(self.config.seed, "sample", prompt.sample_id, index)

    def _attempt(self, prompt: PromptRow, index: int, completion: Completion) -> Attempt:
        closing = closing_ids(self.tokenizer, completion)
        own = (True,) * len(completion.token_ids) + (False,) * len(closing)
        return Attempt(
            sample_id=prompt.sample_id,
            domain=prompt.refiner_mode,
            index=index,
            seed=self._seed(prompt, index),
            token_ids=completion.token_ids + closing,
            own=own if closing else None,
            text=completion_text(self.tokenizer, completion),
            ended=completion.finish_reason,
        )

    def _scored(self, prompt: PromptRow, attempt: Attempt, result: RewardResult) -> Attempt:
        highest = highest_reward(prompt, self.config.reward)
        total = result.total
        share = None if total is None or highest <= 0 else min(1.0, max(0.0, total / highest))
        return replace(
            attempt,
            status=result.status,
            flaw=_flaw(attempt, result, highest),
            score=share,
            partial=share,
            reward=total,
            components=dict(result.components),
            detail=[dict(judgement) for judgement in result.judgements],
        )

    def demonstration(self, prompt: PromptRow, attempt: Attempt) -> DemonstrationRow:
        """Prompt and answer, loss on the answer and on the token that ends it: sampled, or appended
        where it was cut at a stop string."""
        return DemonstrationRow(
            demonstration_id(attempt),
            prompt.prompt_ids + attempt.token_ids,
            (False,) * len(prompt.prompt_ids) + (True,) * len(attempt.token_ids),
        )


def _flaw(attempt: Attempt, result: RewardResult, highest: float) -> Flaw:
    if result.status == "unscored":
        return "unscored"
    if attempt.ended != "stop":
        return "truncated"
    if result.status == "malformed":
        return "malformed"
    return "" if highest > 0 else "no_reward"
