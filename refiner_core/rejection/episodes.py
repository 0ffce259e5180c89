"""Attempts of an agent: episodes, scored by their environment.

In: tasks, a generator, an environment. Out: attempts.

An episode's score is its environment's reward, its partial score the weighted share of checks that
passed. One that ended with a turn that is no tool call, or at a limit of turns or tokens, is never
kept, whatever it had done by then: what would be learnt is to end so. Errors of the infrastructure
count as no attempt; beyond ``environment.max_error_share`` of a batch the stage stops, resumable.

With an ordered schedule a batch is sampled whole or not at all (the turns of its episodes are
decoded together, and the same company gives the same bits). An eager one is repeatable to nobody's
eye anyway, and its users may cost money: there every episode that has ended is kept, and a batch
that was cut short goes on with those that are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.seeds import derive_seed
from refiner_core.contract.types import Completion, DemonstrationRow, Generator, PromptRow
from refiner_core.environments.episodes import EpisodeRequest, run_episodes, settings_of
from refiner_core.environments.protocol import Environment
from refiner_core.environments.record import EpisodeRecord, record_from_json
from refiner_core.environments.rows import domain_of_id, task_of_row
from refiner_core.environments.scoring import require_episode_errors
from refiner_core.environments.turn_template import turn_template
from refiner_core.rejection.attempts import Attempt, Key
from refiner_core.rejection.lane import (
    Begun,
    Keep,
    OnFinished,
    OnJudged,
    PartlyDone,
    demonstration_id,
)
from refiner_core.rejection.selection import Flaw

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
            flaw=_flaw(record),
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


def _flaw(record: EpisodeRecord) -> Flaw:
    if record.status == "error":
        return "error"
    if record.ended == "no_call":
        return "malformed"
    return "truncated" if record.ended in _LIMITS else ""
