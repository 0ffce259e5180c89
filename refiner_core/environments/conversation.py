"""The token ids of an episode: appended to, never tokenised again.

In: messages as text, sampled token ids with their log-probabilities. Out: one sequence of ids, and
for each of them whether the model sampled it.

What a model was conditioned on is what it is trained on, to the token. A conversation that is
rendered and tokenised anew for every turn is not: the same text has many spellings in tokens
(``get`` + ``_order`` or ``get_`` + ``order``), sampling picks any of them, and templates rewrite
earlier turns. So a turn's ids go in as they were sampled, and only what others say is tokenised,
once, when it comes. Two things follow that a template alone would do otherwise:

- The empty think block that Qwen3 puts before a turn where thinking is off stays before *every*
  turn; its own history drops it from earlier ones. The ids are those that were conditioned on.
- A boundary of turns is a boundary of tokens, also where text across it would merge into one.

Demonstrations for SFT are made by the same code, so that they and rollouts agree on every token
that is not the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from refiner_core.environments.protocol import Message, ToolCall, ToolSpec
from refiner_core.environments.turn_template import turn_template
from refiner_core.environments.turns import call_text

#: Characters per token of room that :meth:`Conversation.overflows` looks at; text has about 4.
_CHARACTERS = 16


def prompt_ids(tokenizer: Any, policy: str, tools: Sequence[ToolSpec]) -> tuple[int, ...]:
    """What all episodes of a domain begin with: the system turn with policy and tools.

    Raises
    ------
    ConfigurationError
        The tokenizer or its chat template cannot be used for this; says why.
    DataError
        A control token of the model stands in the policy or a tool's description.
    """
    return turn_template(tokenizer).system(policy, tools)


class Conversation:
    """One episode as tokens. Positions count from the beginning, the prompt included.

    Parameters
    ----------
    tokenizer
        Any of transformers with a chat template that knows system, user, assistant and tool turns.
    prompt_ids
        Of :func:`prompt_ids`.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._template = turn_template(tokenizer)
        self._ids = list(prompt_ids)
        self._own = [False] * len(self._ids)
        self._logprobs = [math.nan] * len(self._ids)
        self._turns, self._open = 0, False

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens so far."""
        return tuple(self._ids)

    @property
    def own_mask(self) -> tuple[bool, ...]:
        """True where the model sampled the token."""
        return tuple(self._own)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The sampler's log-probabilities; NaN where the model sampled nothing."""
        return tuple(self._logprobs)

    def observation(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """What :meth:`observe` would append: the end of the turn where it is missing, the messages
        and the beginning of the next turn."""
        if self._turns == 0:
            return self._template.first(messages)
        return (*self._missing_end(), *self._template.following(messages))

    def overflows(self, messages: Sequence[Message], room: int) -> bool:
        """Whether messages are so long that their beginning alone takes more than ``room`` tokens.

        False says nothing. A tool's 5 MB would take minutes to tokenise, in the thread that all
        episodes wait for, only to find that it does not fit. The beginning must take twice the
        room, as the text behind it may change how its last word is divided.
        """
        left = _CHARACTERS * max(0, room)
        if sum(len(message.content) for message in messages) <= left:
            return False
        beginning = []
        for message in messages:
            beginning.append(Message(message.role, message.content[:left]))
            left -= len(beginning[-1].content)
        return len(self.observation(beginning)) >= 2 * room

    def observe(self, messages: Sequence[Message]) -> None:
        """Append what others say, up to where the model writes again."""
        self.append(self.observation(messages))

    def append(self, observation: Sequence[int]) -> None:
        """Append ids of :meth:`observation`, for who has counted them first."""
        self._add(observation, own=False)
        self._open = False

    def own(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append a turn as it was sampled, its stop token included.

        Parameters
        ----------
        token_ids, logprobs
            Of one length.
        """
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} tokens, and {len(logprobs)} log-probabilities")
        self._ids += token_ids
        self._own += [True] * len(token_ids)
        self._logprobs += logprobs
        self._turns, self._open = self._turns + 1, True

    def close_turn(self, *, own: bool = False) -> None:
        """Append the end-of-turn token where the model has not sampled it: it stops at
        ``</tool_call>``. ``own``: as a token that carries loss, in demonstrations."""
        self._add(self._missing_end(), own=own)
        self._open = False

    def _missing_end(self) -> tuple[int, ...]:
        end = self._template.end_of_turn
        if not self._open or tuple(self._ids[-len(end) :]) == end:
            return ()
        return end

    def _add(self, ids: Sequence[int], *, own: bool) -> None:
        self._ids += ids
        self._own += [own] * len(ids)
        self._logprobs += [math.nan] * len(ids)


def demonstration(
    tokenizer: Any,
    prompt_ids: Sequence[int],
    first_messages: Sequence[Message],
    turns: Sequence[tuple[ToolCall | str, Sequence[Message]]],
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Token ids and loss mask of an episode that somebody has shown.

    Parameters
    ----------
    prompt_ids
        Of :func:`prompt_ids`.
    first_messages
        What the episode began with.
    turns
        Each turn (a call, or text as it stands) with what was said after it. What follows the last
        turn is left out: nothing is learned from it.

    Returns
    -------
    tuple
        Ids, and for each whether it carries loss: the turns and their end-of-turn tokens.
    """
    conversation = Conversation(tokenizer, prompt_ids)
    conversation.observe(first_messages)
    template = turn_template(tokenizer)
    for number, (turn, messages) in enumerate(turns, start=1):
        ids = template.own(turn if isinstance(turn, str) else call_text(turn))
        conversation.own(ids, [math.nan] * len(ids))
        conversation.close_turn(own=True)
        if number < len(turns):
            conversation.observe(messages)
    return conversation.ids, conversation.own_mask
