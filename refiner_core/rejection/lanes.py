"""What samples and scores a batch: answers or episodes.

In: prompts. Out: attempts. See :mod:`.answers` and :mod:`.episodes`, which do it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from refiner_core.answers import parse_evidence
from refiner_core.contract.config import GrpoConfig, RecipeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.fingerprint import derive_seed
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
from refiner_core.environments.conversation import turn_template
from refiner_core.environments.episodes import EpisodeRequest, run_episodes, settings_of
from refiner_core.environments.protocol import (
    Environment,
    EpisodeRecord,
    domain_of_id,
    record_from_json,
    task_of_row,
)
from refiner_core.environments.scoring import require_episode_errors
from refiner_core.generation.completions import closing_ids, completion_text
from refiner_core.rejection.attempts import Attempt, Flaw, Key
from refiner_core.rewards import RewardInput, RewardStream, require_scored
from refiner_core.rewards.combine import aggregate_rubrics, reward_terms, total_reward
from refiner_core.rubrics import select_rubrics

#: Told of (attempts judged, attempts of the batch).
OnJudged = Callable[[int, int], None]
#: Told of (attempts finished, attempts of the batch).
OnFinished = Callable[[int, int], None]

#: Told of all attempts of a batch that are finished by now, where parts of it may be kept.
Keep = Callable[[Mapping[Key, Attempt]], None]


@dataclass(frozen=True)
class Begun:
    """Attempts that are sampled, in order of (prompt, number). ``judging``: somebody works on their
    rewards meanwhile; ``finish`` waits for it and gives them with their scores."""

    attempts: tuple[Attempt, ...]
    judging: bool
    finish: Callable[[OnJudged], list[Attempt]]


class PartlyDone(Exception):
    """A batch was cut short by ``why``, and these of its attempts are finished and may be kept."""

    def __init__(self, attempts: tuple[Attempt, ...], why: RefinerError) -> None:
        super().__init__(f"{len(attempts)} attempts of a batch are finished")
        self.attempts, self.why = attempts, why


class Lane(Protocol):
    """Samples and scores."""

    @property
    def name(self) -> str:
        """``answers`` or ``episodes``."""
        ...

    @property
    def keeps_parts(self) -> bool:
        """Whether attempts of a batch that was cut short may be kept."""
        ...

    def begin(
        self,
        prompts: Sequence[PromptRow],
        known: Sequence[Attempt],
        on_finished: OnFinished,
        should_stop: Callable[[], bool],
        keep: Keep,
    ) -> Begun:
        """Sample all attempts at these prompts that are not ``known`` from an earlier try. Where
        parts may be kept, ``keep`` is told after each.

        Raises
        ------
        PartlyDone
            A stop was asked for, or an error came, and what is finished may be kept.
        """
        ...

    def demonstration(self, prompt: PromptRow, attempt: Attempt) -> DemonstrationRow:
        """An attempt that is kept, as what is fine-tuned on."""
        ...


def demonstration_id(attempt: Attempt) -> str:
    """Its prompt's id and its number: ids of tasks begin with their domain, and so do these."""
    return f"{attempt.sample_id}#{attempt.index}"


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
            flaw=_answer_flaw(attempt, result, highest),
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


def _answer_flaw(attempt: Attempt, result: RewardResult, highest: float) -> Flaw:
    if result.status == "unscored":
        return "unscored"
    if attempt.ended != "stop":
        return "truncated"
    if result.status == "malformed":
        return "malformed"
    return "" if highest > 0 else "no_reward"


_LIMITS = ("turn_limit", "context_limit")


class EpisodeLane:
    """Samples batches of episodes."""

    name = "episodes"

    def __init__(
        self, config: RecipeConfig, environment: Environment, generator: Generator, tokenizer: Any
    ) -> None:
        rule = config.sample
        self.config, self.environment = config, environment
        self.generator, self.tokenizer = generator, tokenizer
        self.settings = settings_of(
            *(config, environment),
            temperature=rule.temperature,
            top_p=rule.top_p,
            top_k=rule.top_k,
        )

    @property
    def keeps_parts(self) -> bool:
        """Whether attempts of a batch that was cut short may be kept."""
        return not self.settings.ordered

    def begin(
        self,
        prompts: Sequence[PromptRow],
        known: Sequence[Attempt],
        on_finished: OnFinished,
        should_stop: Callable[[], bool],
        keep: Keep,
    ) -> Begun:
        """Play all episodes of these tasks that are not ``known`` from an earlier try.

        Raises
        ------
        PartlyDone
            A stop was asked for, or an error came, and what has ended may be kept.

        The ``finish`` of what comes back raises ``EnvironmentOutage`` where errors of the
        infrastructure ended too many.
        """
        keys = [(p, index) for p in prompts for index in range(self.config.sample.attempts)]
        attempts = {attempt.key: attempt for attempt in known}
        left = [(p, index) for p, index in keys if Key(p.sample_id, index) not in attempts]
        requests = [
            EpisodeRequest(task_of_row(p), p.prompt_ids, self._seed(p, index)) for p, index in left
        ]

        def ended(place: int, completion: Completion) -> None:
            attempt = self._attempt(*left[place], completion)
            attempts[attempt.key] = attempt
            on_finished(len(attempts), len(keys))
            if self.keeps_parts:
                keep(attempts)

        try:
            run_episodes(
                *(self.generator, self.environment, self.tokenizer, requests, self.settings, ended),
                should_stop=should_stop if self.keeps_parts else None,
            )
        except RefinerError as error:
            if not self.keeps_parts:
                raise
            raise PartlyDone(_in_order(keys, attempts), error) from error
        made = _in_order(keys, attempts)
        if len(made) != len(keys):
            raise RuntimeError(f"{len(made)} of {len(keys)} episodes have ended")

        def finish(on_judged: OnJudged) -> list[Attempt]:
            self._require(made)
            return list(made)

        return Begun(made, False, finish)

    def _require(self, made: Sequence[Attempt]) -> None:
        """Raises :class:`EnvironmentOutage` where errors ended too many."""
        failed = [attempt for attempt in made if attempt.status == "error"]
        require_episode_errors(
            Counter(attempt.error_kind for attempt in failed),
            len(made),
            self.config.environment.max_error_share,
            of="episodes of a batch",
            example=failed[0].error if failed else "",
        )

    def _seed(self, prompt: PromptRow, index: int) -> int:
        return derive_seed(self.config.seed, "sample", prompt.sample_id, index)

    def _attempt(self, prompt: PromptRow, index: int, completion: Completion) -> Attempt:
        record = record_from_json(completion.episode or {})
        return Attempt(
            sample_id=prompt.sample_id,
            domain=domain_of_id(prompt.sample_id),
            index=index,
            seed=self._seed(prompt, index),
            token_ids=completion.token_ids,
            own=completion.own,
            text="\n".join(turn.text for turn in record.turns),
            ended=record.ended,
            status="error" if record.status == "error" else _status(record),
            flaw=_episode_flaw(record),
            score=record.reward,
            partial=record.partial,
            reward=record.reward,
            tools=record.tools,
            components=dict(record.components),
            detail=_without_times(record),
            error_kind=record.error_kind,
            error=record.error,
        )

    def demonstration(self, prompt: PromptRow, attempt: Attempt) -> DemonstrationRow:
        """The whole episode, loss on the model's own tokens and on the token that ends each of its
        turns; what follows the last of them is left out."""
        own = attempt.own or (True,) * len(attempt.token_ids)
        end = tuple(turn_template(self.tokenizer).end_of_turn)
        before = prompt.prompt_ids
        room = self.settings.context_tokens - len(before)
        ids, loss = with_ends_of_turns(attempt.token_ids, own, end, room)
        return DemonstrationRow(
            demonstration_id(attempt), before + ids, (False,) * len(before) + loss
        )


def _in_order(
    keys: Sequence[tuple[PromptRow, int]], attempts: Mapping[Key, Attempt]
) -> tuple[Attempt, ...]:
    """Those that are there, in the order of ``keys``."""
    wanted = (Key(prompt.sample_id, index) for prompt, index in keys)
    return tuple(attempts[key] for key in wanted if key in attempts)


def with_ends_of_turns(
    ids: Sequence[int], own: Sequence[bool], end: tuple[int, ...], room: int
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Tokens of an episode up to the end of the model's last turn, and which of them carry loss:
    the model's own, and ``end`` after each of its turns.

    A turn is sampled up to ``</tool_call>``, and the template ends it; a model that is only ever
    cut off there would not learn to end its turn. The last turn's end is appended where it lacks,
    as long as all of it is no longer than ``room``: a pack holds what a context holds.
    Shapes: one value per token.
    """
    length = max((place + 1 for place, is_own in enumerate(own) if is_own), default=0)
    loss = list(own)
    for place in range(1, length):
        if own[place - 1] and not own[place] and tuple(ids[place : place + len(end)]) == end:
            loss[place : place + len(end)] = [True] * len(end)
    kept = tuple(ids[:length])
    missing = () if kept[-len(end) :] == end or length + len(end) > room else end
    return kept + missing, (*loss[:length], *(True for _ in missing))


def _without_times(record: EpisodeRecord) -> dict[str, Any]:
    """The record but for how long tools took: the same episode is the same to the bit."""
    values = record.as_json()
    turns = [{k: v for k, v in turn.items() if k != "seconds"} for turn in values["turns"]]
    return values | {"turns": turns}


def _status(record: EpisodeRecord) -> Any:
    return "malformed" if record.ended == "no_call" else "scored"


def _episode_flaw(record: EpisodeRecord) -> Flaw:
    if record.status == "error":
        return "error"
    if record.ended == "no_call":
        return "malformed"
    return "truncated" if record.ended in _LIMITS else ""
