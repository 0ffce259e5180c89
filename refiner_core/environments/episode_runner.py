"""One running episode: its state between turns, and its work in threads.

In: a request, and results of generator and environment. Out: turn requests, and in the end a
:class:`~refiner_core.contract.types.Completion` with the episode's record.

The state belongs to the generator's thread; :meth:`EpisodeRunner.begin`, :meth:`EpisodeRunner.step`
and :meth:`EpisodeRunner.end` run in a worker, and touch the environment's episode only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from refiner_core.contract.errors import RefinerError, StageFailed
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.sections.environment import EnvironmentConfig, check_weights
from refiner_core.contract.types import Completion, SamplingParams, TurnRequest, whole_text
from refiner_core.environments.conversation import Conversation
from refiner_core.environments.protocol import (
    Environment,
    Episode,
    EpisodeRecord,
    InfrastructureError,
    Message,
    Outcome,
    Step,
    Task,
    ToolCall,
    TurnRecord,
)
from refiner_core.environments.scoring import partial_score
from refiner_core.environments.turns import ParsedTurn, parse_turn

log = logging.getLogger(__name__)
#: Recorded characters of a message that did not fit into the context.
_UNREAD = 65536

Ending = Literal["done", "no_call", "turn_limit", "context_limit", "error"]


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode of a task. ``prompt_ids`` are those of its domain
    (:func:`refiner_core.environments.conversation.prompt_ids`); ``seed`` decides all randomness."""

    task: Task
    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class EpisodeSettings:
    """Settings of episodes. ``section`` is the recipe's; ``context_tokens`` is the limit of a whole
    episode, prompt included; ``sampling`` applies to a turn; ``ordered`` is the resolved value of
    the section's schedule."""

    section: EnvironmentConfig
    context_tokens: int
    sampling: SamplingParams
    ordered: bool


#: Result of a call: the step, and the outcome if it was the last.
Stepped = tuple[Step, Outcome | None]


class _Attempt(NamedTuple):
    text: str
    completion: Completion
    parsed: ParsedTurn


class EpisodeRunner:
    """One episode.

    Parameters
    ----------
    number
        Its place among the requests, and its conversation number for the generator.
    """

    def __init__(
        self,
        number: int,
        request: EpisodeRequest,
        environment: Environment,
        tokenizer: Any,
        settings: EpisodeSettings,
    ) -> None:
        self.number, self.request = number, request
        self.conversation = Conversation(tokenizer, request.prompt_ids)
        #: Seconds of work by tools and user.
        self.seconds = 0.0
        self.ended: Ending | None = None
        self._environment, self._settings = environment, settings
        self._episode: Episode | None = None
        self._first: tuple[Message, ...] = ()
        self._turns: list[TurnRecord] = []
        self._failed: _Attempt | None = None

    # ------------------------------------------------ in a worker's thread

    def begin(self) -> tuple[Message, ...]:
        """Create the environment's episode and reset it; returns the first messages."""
        with _blamed(self):
            self._episode = self._environment.episode(self.request.task)
            messages = self._episode.reset(derive_seed(self.request.seed, "environment"))
            messages = _messages(messages)
            if not messages or messages[-1].role != "user":
                raise ValueError("reset() gives messages, the last of them the user's")
            return messages

    def step(self, call: ToolCall, *, last: bool) -> Stepped:
        """Take a step; includes the outcome if the episode is done, or this was its last turn."""
        with _blamed(self):
            assert self._episode is not None
            step = self._episode.step(call)
            step = replace(step, messages=_messages(step.messages))
            if not step.done and not step.messages:
                raise ValueError("step() gives no message, and the episode is not done")
        return step, self.end() if step.done or last else None

    def end(self) -> Outcome:
        """Return the outcome, as it stands; the episode is not used afterwards."""
        with _blamed(self):
            assert self._episode is not None
            outcome = self._episode.outcome()
            self._episode.close()
            self._episode = None
            return outcome

    def close(self) -> None:
        """Release its resources, in any state."""
        episode, self._episode = self._episode, None
        if episode is None:
            return
        try:
            episode.close()
        except Exception:  # it has already failed, and that error is reported
            log.warning("Closing an episode of %s failed", self.where(), exc_info=True)

    # ------------------------------------------------ in the generator's thread

    def where(self) -> str:
        """Environment, task and turn, for messages."""
        task = self.request.task
        where = f"environment {self._environment.name}, task {task.id} of {task.domain}"
        return f"{where}, turn {len(self._turns)}" if self._turns else f"{where}, reset"

    def limit_s(self) -> float:
        """Time limit of the next piece of environment work."""
        section = self._settings.section
        left = section.episode_timeout_s - self.seconds
        return max(0.0, min(section.turn_timeout_s, left))

    def late(self, seconds: float) -> InfrastructureError:
        """Error for work that exceeded the limit."""
        section = self._settings.section
        kind, limit = "turn_timeout", section.turn_timeout_s
        if self.seconds + seconds >= section.episode_timeout_s:
            kind, limit = "episode_timeout", section.episode_timeout_s
        return InfrastructureError(
            f"Tools and user took longer than {limit:g} s ({self.where()})",
            kind=kind,
            expected="an answer within that time",
            fix=f"raise environment.{kind}_s, or find out why they are slow",
        )

    def begun(self, messages: tuple[Message, ...]) -> bool:
        """Append the first messages; False if they do not fit into the context."""
        self._first = messages
        fits = self._observe(self._first)
        if not fits:
            self._first = _shortened(self._first)
        return fits

    def stepped(self, stepped: Stepped, seconds: float) -> bool:
        """Append a step's messages; False if they do not fit into the context."""
        step, outcome = stepped
        over = outcome is not None
        fits = over or self._observe(step.messages)
        self._turns[-1] = replace(
            self._turns[-1],
            tool_error=step.tool_error,
            messages=_pairs(step.messages if fits and not over else _shortened(step.messages)),
            seconds=seconds,
        )
        return fits

    def _observe(self, messages: tuple[Message, ...]) -> bool:
        """Append messages, whole or not at all, leaving at least one token for the turn."""
        if self.conversation.overflows(messages, self._space()):
            return False
        ids = self.conversation.observation(messages)
        if len(self.conversation) + len(ids) >= self._settings.context_tokens:
            return False
        self.conversation.append(ids)
        return True

    def turn(self) -> TurnRequest:
        """Request for the current turn."""
        params = self._settings.sampling
        params = replace(params, max_new_tokens=min(params.max_new_tokens, self._space()))
        if self._failed is not None:
            params = replace(params, temperature=0.0, top_p=1.0, top_k=0)
        seed = derive_seed(self.request.seed, "turn", len(self._turns))
        return TurnRequest(self.number, self.conversation.ids, seed, params)

    def _space(self) -> int:
        return self._settings.context_tokens - len(self.conversation)

    def sampled(self, text: str, completion: Completion) -> ToolCall | Literal["again"] | None:
        """Process a sampled turn: returns its call, ``again`` for a turn to be repaired, or None if
        the episode is over (see :attr:`ended`)."""
        settings = self._settings
        ran_out = completion.finish_reason == "length"
        parsed = parse_turn(text, settings.section.max_argument_bytes, ran_out=ran_out)
        attempt = _Attempt(text, completion, parsed)
        first, self._failed = self._failed, None
        if parsed.call is not None:
            self._own(attempt, repaired=first.text if first else None)
            return parsed.call
        if first is not None:
            self._own(first, retried=text)
            self.ended = "no_call"
        elif ran_out and self._space() < settings.sampling.max_new_tokens:
            self._own(attempt)
            self.ended = "context_limit"
        elif settings.section.repairs > 0:
            self._failed = attempt
            return "again"
        else:
            self._own(attempt)
            self.ended = "no_call"
        return None

    def _own(
        self, attempt: _Attempt, *, repaired: str | None = None, retried: str | None = None
    ) -> None:
        """Make an attempt the turn, and append its tokens to the conversation."""
        start = len(self.conversation) - len(self.request.prompt_ids)
        self.conversation.own(attempt.completion.token_ids, attempt.completion.logprobs)
        call = attempt.parsed.call
        turn = TurnRecord(
            text=attempt.text,
            status=attempt.parsed.status,
            start=start,
            end=start + len(attempt.completion.token_ids),
            call=call.as_json() if call else None,
            repaired=repaired,
            retried=retried,
        )
        self._turns.append(turn)

    @property
    def last(self) -> bool:
        """True if no turn may follow this one."""
        return len(self._turns) >= self._settings.section.max_turns

    def finished(self, outcome: Outcome) -> Completion:
        """The episode with its outcome.

        Raises
        ------
        StageFailed
            The outcome cannot be recorded: a reward that is no finite number, info that is not
            JSON.
        """
        shaping = self._settings.section.shaping
        partial = partial_score(outcome.checks, check_weights(shaping, self.request.task.domain))
        no_call = self.ended == "no_call"
        # The reward alone decides success, whatever failure is given with it.
        failure = None if outcome.success else outcome.failure or "incomplete"
        if no_call:
            failure = "no_call"
        elif self.ended in ("turn_limit", "context_limit"):
            failure = None if outcome.success else "limit"
        record = replace(
            self._record("finished"),
            reward=0.0 if no_call else outcome.reward,
            partial=partial,
            checks=tuple(dict(check.__dict__) for check in outcome.checks),
            components=dict(outcome.components),
            excluded=tuple(outcome.excluded),
            failure=failure,
            info=dict(outcome.info),
        )
        return self._completion(record)

    def failed(self, error: InfrastructureError) -> Completion:
        """The completion of an episode ended by the infrastructure."""
        self.ended = "error"
        record = replace(self._record("error"), error_kind=error.kind, error=error.paragraph())
        return self._completion(record)

    def _record(self, status: Literal["finished", "error"]) -> EpisodeRecord:
        assert self.ended is not None
        return EpisodeRecord(
            task_id=self.request.task.id,
            domain=self.request.task.domain,
            seed=self.request.seed,
            status=status,
            ended=self.ended,
            first_messages=_pairs(self._first),
            turns=tuple(self._turns),
        )

    def _completion(self, record: EpisodeRecord) -> Completion:
        values = record.as_json()
        with _blamed(self):
            json.dumps(values, allow_nan=False)
        limited = record.ended in ("turn_limit", "context_limit")
        begin = len(self.request.prompt_ids)
        return Completion(
            token_ids=self.conversation.ids[begin:],
            logprobs=self.conversation.logprobs[begin:],
            finish_reason="length" if limited else "stop",
            own=self.conversation.own_mask[begin:],
            episode=values,
        )


@contextmanager
def _blamed(play: EpisodeRunner) -> Iterator[None]:
    """Convert an environment's exceptions to an error that names environment, task and turn.
    Errors of refiner pass unchanged, including those of the infrastructure."""
    try:
        yield
    except RefinerError:
        raise
    except BaseException as error:
        raise StageFailed(
            f"An environment failed ({play.where()}): {type(error).__name__}: {error}",
            expected="errors of a model to be answered by a message, and those of a user simulator "
            "or another outside thing to be an InfrastructureError",
            fix="correct the environment; the traceback is in the log",
        ) from error


def _messages(messages: Any) -> tuple[Message, ...]:
    """Messages, type-checked, as text that can be encoded."""
    checked = []
    for message in messages:
        if not isinstance(message, Message) or message.role not in ("user", "tool"):
            raise TypeError(f"a message is a Message of user or tool, not {message!r:.80}")
        if not isinstance(message.content, str):
            raise TypeError(f"a message's content is text, not {message.content!r:.80}")
        checked.append(Message(message.role, whole_text(message.content)))
    return tuple(checked)


def _shortened(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Shortened unread messages for the record: 5 MB in each of many episodes fill a disk."""
    shown = []
    for message in messages:
        text, more = message.content, len(message.content) - _UNREAD
        cut = f"{text[:_UNREAD]} … ({more} more characters)" if more > 0 else text
        shown.append(replace(message, content=cut))
    return tuple(shown)


def _pairs(messages: tuple[Message, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((message.role, message.content) for message in messages)
