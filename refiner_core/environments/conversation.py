"""The token ids of an episode: append-only, never tokenised again.

In: messages as text, sampled token ids with their log-probabilities. Out: one sequence of ids, and
for each id whether the model sampled it.

A model is trained on exactly the tokens that it was conditioned on. Rendering and tokenising the
conversation again for every turn would violate this: the same text has many tokenisations (``get``
+ ``_order`` or ``get_`` + ``order``), sampling picks any of them, and templates rewrite earlier
turns. So a turn's ids are appended as sampled, and only other messages are tokenised, once, on
arrival. This differs from a template in two ways:

- The empty think block that Qwen3 puts before a turn with thinking off stays before *every* turn,
  while the template drops it from earlier ones. The ids are those of the conditioning.
- A boundary of turns is a boundary of tokens, even if text across it would merge into one.

Demonstrations for SFT use the same code, so that they and rollouts agree on every token
that is not the model's own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.types import whole_text
from refiner_core.environments.protocol import Message, ToolCall, ToolSpec
from refiner_core.environments.turns import call_text

_Turn = dict[str, str]
TEMPLATE_FIX = "set model.chat_template to a ChatML-like template, or use another tokenizer"
_SYSTEM: _Turn = {"role": "system", "content": "REFINER-RULES"}
_AGENT = "REFINER-AGENT-TURN"
#: Placeholders for everything before an agent's turn, and for the turn.
_HISTORY: tuple[_Turn, ...] = (
    _SYSTEM,
    {"role": "user", "content": "REFINER-TASK"},
    {"role": "assistant", "content": _AGENT},
)


#: Messages that test whether a template copies them verbatim: surrounding white space, quotes,
#: strings that templates search for. Rendering each message would double the time between turns.
_PROBES = (
    ' a "b" <c>\n',
    "\n\n{'d': [1]}",
    '{"e": "f"}',
    "<think>g</think>\n\nh",
    "<tool_response>\ni\n</tool_response>",
    "<tool_call>j</tool_call>",
)


class _Frame(NamedTuple):
    """A template's text around messages of given roles: ``texts[i]`` before message i, the last
    one after all; ``control`` counts the special tokens in them; ``plain``: messages are copied
    verbatim, as tested by :data:`_PROBES`."""

    texts: tuple[str, ...]
    control: int
    plain: bool = False

    def around(self, contents: Sequence[str]) -> str:
        """The text from the start to the end of what follows the last of these contents."""
        filled = "".join(t + c for t, c in zip(self.texts, contents, strict=False))
        return filled + self.texts[len(contents)]


class TurnTemplate:
    """The parts of a tokenizer's chat template; made by :func:`turn_template`.

    Raises
    ------
    ConfigurationError
        The template has no such parts, or tokenising text in pieces changes it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        special = set(tokenizer.all_special_tokens)
        self._special = _any_of(special)
        self._control = _any_of(special | set(getattr(tokenizer, "get_added_vocab", dict)()))
        self._special_ids = frozenset(
            tokenizer.convert_tokens_to_ids(token) for token in sorted(special)
        )
        self._frames: dict[tuple[bool, tuple[str, ...]], _Frame] = {}
        self._require_pieces()
        self._rules_text = self._system_text(_SYSTEM, ())
        after = self._render(_HISTORY).partition(_AGENT)[2]
        self._end_text = after[: end_of_turn(after, tokenizer)]
        #: Ids of the token that ends an agent's turn.
        self.end_of_turn = self._encode(self._end_text)

    def system(self, policy: str, tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        """Ids of the system turn with the policy and the tools, up to the first message.

        Raises
        ------
        DataError
            The policy or a tool's description contains a special token.
        """
        listed = [tool.as_json() for tool in tools]
        for text in (policy, json.dumps(listed, ensure_ascii=False)):
            found = self._special.search(text)
            if found:
                raise DataError(
                    f"The policy or a tool's description holds {found.group()!r}, which is a "
                    "control token of the model: it would end the system's turn",
                    expected="rules and descriptions in plain text",
                    fix="rephrase it in the environment",
                )
        return self._encode(self._system_text({"role": "system", "content": policy}, listed))

    def own(self, text: str) -> tuple[int, ...]:
        """Ids of an agent's written (not sampled) turn. Special tokens in it are plain text."""
        return self._encode_pieces(_cut(text, self._special), control=0)

    def ids(self, messages: Sequence[Message], *, first: bool) -> tuple[int, ...]:
        """Ids of messages up to the start of the agent's (next) turn: the messages at the start of
        an episode, else those after an agent's turn."""
        messages = [Message(m.role, whole_text(m.content)) for m in messages]
        frame = self._frame(tuple(m.role for m in messages), first=first)
        pieces = [frame.texts[0]]
        contents: Sequence[str] = [m.content for m in messages]
        if not frame.plain:
            contents = self._as_rendered(frame, messages, first=first)
        for content, text in zip(contents, frame.texts[1:], strict=True):
            beginning, *others = _cut(content, self._control)
            pieces[-1] += beginning
            pieces += others
            pieces[-1] += text
        return self._encode_pieces(pieces, control=frame.control)

    def _frame(self, roles: tuple[str, ...], *, first: bool) -> _Frame:
        known = self._frames.get((first, roles))
        if known is not None:
            return known
        marks = [f"REFINER-MESSAGE-{number}-END" for number in range(len(roles))]
        rest = self._rendered(roles, marks, first=first)
        texts = []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found:
                raise _unclear("leaves a message out")
            texts.append(before)
        texts.append(rest)
        frame = _Frame(tuple(texts), self._count_special(self._encode("".join(texts))))
        plain = all(
            self._rendered(roles, [probe] * len(roles), first=first)
            == frame.around([probe] * len(roles))
            for probe in _PROBES
        )
        frame = self._frames[(first, roles)] = frame._replace(plain=plain)
        return frame

    def _as_rendered(
        self, frame: _Frame, messages: Sequence[Message], *, first: bool
    ) -> Sequence[str]:
        """The contents as rendered by the template: some trim, some write JSON."""
        roles = tuple(m.role for m in messages)
        contents = [m.content for m in messages]
        whole = self._rendered(roles, contents, first=first)
        if whole == frame.around(contents):
            return contents
        written = []
        for number, content in enumerate(contents):
            others = ["x"] * len(contents)
            before, after = frame.around(others[:number]), frame.around(others)
            after = after[len(before) + 1 :]
            others[number] = content
            text = self._rendered(roles, others, first=first)
            if not (text.startswith(before) and text.endswith(after)):
                raise _unclear("writes other text around a message than around others")
            written.append(text[len(before) : len(text) - len(after)])
        if whole != frame.around(written):
            raise _unclear("writes a message otherwise beside others")
        return written

    def _rendered(self, roles: Sequence[str], contents: Sequence[str], *, first: bool) -> str:
        """The template's text after the system's turn, or after the end of the agent's."""
        turns = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        if first:
            text, behind = self._render([_SYSTEM, *turns], begin=True), self._rules_text
        else:
            text = self._render([*_HISTORY, *turns], begin=True).partition(_AGENT)[2]
            behind = self._end_text
        if not text.startswith(behind):
            raise _unclear("writes earlier turns otherwise with later ones behind them")
        return text[len(behind) :]

    def _system_text(self, system: _Turn, tools: Sequence[Any]) -> str:
        """The system's turn alone: the text before a user's turn, without that turn's opening,
        since some templates render no system turn without a user's."""
        one, two = "REFINER-USER-A", "REFINER-USER-B"
        turns = [system, {"role": "user", "content": one}, {"role": "user", "content": two}]
        head, first, rest = self._render(turns, tools).partition(one)
        between, second, end = rest.partition(two)
        opening = between[len(end) :]
        if not (first and second and between.startswith(end) and head.endswith(opening)):
            raise _unclear("opens and ends turns of the user in more than one way")
        return head[: len(head) - len(opening)]

    def _render(
        self, turns: Sequence[_Turn], tools: Sequence[Any] = (), *, begin: bool = False
    ) -> str:
        return rendered(
            *(self.tokenizer, turns, "an episode with tools"),
            tools=list(tools) or None,
            add_generation_prompt=begin,
            enable_thinking=False,
        )

    def _encode_pieces(self, pieces: Sequence[str], *, control: int) -> tuple[int, ...]:
        ids = tuple(token for piece in pieces if piece for token in self._encode(piece))
        found = self._count_special(ids)
        if found != control:
            raise ConfigurationError(
                f"The tokenizer makes {found} control tokens of a turn where the template has "
                f"{control}: words of a tool or user would be read as control tokens",
                expected="special tokens that stand for their exact text alone",
                fix="set model.tokenizer_name_or_path to such a tokenizer",
            )
        return ids

    def _count_special(self, ids: Sequence[int]) -> int:
        return sum(token in self._special_ids for token in ids)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _require_pieces(self) -> None:
        pieces = ("Rules\n", "<tool", "_call>", " a", "b\n\n", " {", "}")
        ids = [token for piece in pieces for token in self._encode(piece)]
        decoded = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if decoded != "".join(pieces):
            raise changes_pieces(
                "a conversation that is appended to would not be the text that it stands for"
            )


def rendered(tokenizer: Any, turns: Sequence[Mapping[str, str]], what: str, **options: Any) -> str:
    """Turns rendered by a tokenizer's chat template; ``what`` names them in the error."""
    try:
        text = tokenizer.apply_chat_template(list(turns), tokenize=False, **options)
    except Exception as error:  # templates raise jinja2 errors, ValueError and others
        raise ConfigurationError(
            f"The chat template cannot render {what}: {type(error).__name__}: {error}",
            expected="a template for system, user, assistant and tool turns in any order",
            fix=TEMPLATE_FIX,
        ) from error
    return str(text)


def end_of_turn(after: str, tokenizer: Any) -> int:
    """Length of the end of an assistant's turn in the following text: up to a special token."""
    found = _any_of(set(tokenizer.all_special_tokens)).search(after)
    if found is None:
        raise ConfigurationError(
            "The chat template ends the assistant's turn without a special token, so the model "
            f"would never learn to stop; after the turn it puts {after[:60]!r}",
            expected="an end-of-turn token such as <|im_end|>",
            fix=TEMPLATE_FIX,
        )
    return found.end()


def changes_pieces(so: str) -> ConfigurationError:
    """Error for a tokenizer that changes text at a boundary of tokens."""
    return ConfigurationError(
        f"The tokenizer changes text that is tokenised in pieces, so {so}",
        expected="a byte-level tokenizer (Qwen, Llama 3, GPT and the like)",
        fix="set model.tokenizer_name_or_path to such a tokenizer",
    )


def turn_template(tokenizer: Any) -> TurnTemplate:
    """The parts of a tokenizer's chat template, cached.

    Raises
    ------
    ConfigurationError
        The template has no such parts, or tokenising text in pieces changes it.
    """
    return _turn_template(tokenizer, str(getattr(tokenizer, "chat_template", None)))


@lru_cache(maxsize=4)
def _turn_template(tokenizer: Any, chat_template: str) -> TurnTemplate:
    return TurnTemplate(tokenizer)


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    """A pattern for any of the tokens, the longest first; with no tokens it never matches."""
    listed = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, listed)) if listed else r"(?!)")


def _cut(text: str, tokens: re.Pattern[str]) -> list[str]:
    """The text in pieces without any of the tokens; at least one piece."""
    pieces, begin = [], 0
    while found := tokens.search(text, begin):
        pieces.append(text[begin : found.start() + 1])
        begin = found.start() + 1
    return [*pieces, text[begin:]]


def _unclear(how: str) -> ConfigurationError:
    return ConfigurationError(
        f"The chat template {how}, so turns cannot be appended to a conversation token by token",
        expected="a template that writes each turn by itself, one after the other",
        fix=TEMPLATE_FIX,
    )


#: More characters than the average token has; text has about 4.
_CHARACTERS = 64


def prompt_ids(tokenizer: Any, policy: str, tools: Sequence[ToolSpec]) -> tuple[int, ...]:
    """The common prefix of all episodes of a domain: the system turn with policy and tools.

    Raises
    ------
    ConfigurationError
        The tokenizer or its chat template cannot be used; the message has the reason.
    DataError
        The policy or a tool's description contains a control token of the model.
    """
    return turn_template(tokenizer).system(policy, tools)


class Conversation:
    """One episode as tokens. Positions count from the start, prompt included.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer with a chat template for system, user, assistant and tool turns.
    prompt_ids
        From :func:`prompt_ids`.
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
        """True for tokens sampled by the model."""
        return tuple(self._own)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The sampler's log-probabilities; NaN for tokens that the model did not sample."""
        return tuple(self._logprobs)

    def observation(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids that :meth:`observe` would append: a missing end of turn, the messages
        and the beginning of the next turn."""
        ids = self._template.ids(messages, first=self._turns == 0)
        return (*self._missing_end(), *ids) if self._turns else ids

    def overflows(self, messages: Sequence[Message], room: int) -> bool:
        """True if messages are so long that they cannot fit into ``room`` tokens. Tokenising a tool
        result of 5 MB would take minutes, in the thread that all episodes share."""
        return sum(len(message.content) for message in messages) > _CHARACTERS * max(0, room)

    def observe(self, messages: Sequence[Message]) -> None:
        """Append messages to the model, up to the start of its next turn."""
        self.append(self.observation(messages))

    def append(self, observation: Sequence[int]) -> None:
        """Append ids of :meth:`observation`, for callers that counted them first."""
        self._add(observation, own=False)
        self._open = False

    def own(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append a turn as sampled, its stop token included.

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
        """Append the end-of-turn token if the model did not sample it: sampling stops at
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
    """Token ids and loss mask of a demonstrated episode.

    Parameters
    ----------
    prompt_ids
        From :func:`prompt_ids`.
    first_messages
        Messages at the start of the episode.
    turns
        Each turn (a call, or verbatim text) with the messages after it. Messages after the last
        turn are dropped, since nothing is learned from them.

    Returns
    -------
    tuple
        Ids, and whether each carries loss: the turns and their end-of-turn tokens do.
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
