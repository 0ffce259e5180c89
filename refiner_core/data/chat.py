"""The chat template applied to rows, and a loss mask that is exact to the token.

In: a :class:`DataRow` and a tokenizer (any ``transformers`` one with a chat template; passed in, so
that nothing here imports torch). Out: the prompt as the sampler sees it, and for demonstrations
the token ids with their loss mask.

The mask: the conversation is rendered a second time with every assistant text replaced
by a mark, which separates template text from assistant text. Each piece is
tokenised separately, so that a boundary of the mask is always a boundary of tokens, and
the prompt's tokens are a true prefix of the demonstration's: sampling is conditioned on exactly
what was trained on. Loss is on the text of every assistant turn and on its end-of-turn token; not
on system, user and tool turns, the template's own text, or an empty think block. Earlier turns
have the template's history form (Qwen3 removes thoughts from it).
"""

from __future__ import annotations

import unicodedata
from typing import Any

from refiner_core.contract.errors import ConfigurationError
from refiner_core.data.rows import DataRow, Message
from refiner_core.environments.conversation import (
    TEMPLATE_FIX,
    changes_pieces,
    end_of_turn,
    rendered,
)

_ANSWER_ONLY = "answer_only"


#: A section of a rendered conversation, and whether its tokens carry loss.
_Piece = tuple[str, bool]


def _options(row: DataRow) -> dict[str, Any]:
    """Turn thinking off if the mode requests the answer only."""
    return {"enable_thinking": False} if row.refiner_mode == _ANSWER_ONLY else {}


def control_token(row: DataRow, tokenizer: Any) -> str | None:
    """A special token of the tokenizer in the row's own text, if any.

    Web pages do contain ``<|im_end|>``; rendered, it would end the user's turn and let evidence
    pose as another role.
    """
    texts = [message["content"] for message in row.messages] + [row.answer or ""]
    for token in tokenizer.all_special_tokens:
        if any(token in text for text in texts):
            return str(token)
    return None


def render_prompt(row: DataRow, tokenizer: Any) -> str:
    """The prompt up to the start of the assistant's text."""
    return rendered(
        tokenizer, list(row.messages), "a row", add_generation_prompt=True, **_options(row)
    )


def _ids(text: str, tokenizer: Any) -> list[int]:
    """Token ids of rendered text, which already has all special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _pieces_of(row: DataRow, tokenizer: Any) -> list[_Piece]:
    """Pieces of a rendered demonstration with and without loss; joined they give the text."""
    answer: Message = {"role": "assistant", "content": row.answer or ""}
    messages = [*row.messages, answer]
    options = {**_options(row), "add_generation_prompt": False}
    full, prompt = rendered(tokenizer, messages, "a row", **options), render_prompt(row, tokenizer)
    if not full.startswith(prompt):
        raise ConfigurationError(
            "The chat template renders a prompt for sampling that is no prefix of the same "
            f"conversation in training: the prompt ends {prompt[-60:]!r}",
            expected="the generation prompt as a prefix of the assistant's turn",
            fix=TEMPLATE_FIX,
        )
    spans = _loss_spans(full, len(prompt), messages, tokenizer, options)
    pieces, cursor = [], 0
    for start, end in spans:
        pieces += [(full[cursor:start], False), (full[start:end], True)]
        cursor = end
    return [piece for piece in (*pieces, (full[cursor:], False)) if piece[0]]


def _loss_spans(
    full: str, prompt_length: int, messages: list[Message], tokenizer: Any, options: dict[str, Any]
) -> list[tuple[int, int]]:
    """Positions in ``full`` (characters) of each assistant turn with its end-of-turn token."""
    between = _template_text(messages, tokenizer, options)
    turns = [m["content"] for m in messages if m["role"] == "assistant"]
    spans: list[tuple[int, int]] = []
    cursor = len(between[0])
    for number, content in enumerate(turns[:-1], start=1):
        after = between[number]
        end = end_of_turn(after, tokenizer)
        # Text before the last turn may change with it (thoughts); the rest may not.
        known = after[:end] if number == len(turns) - 1 else after
        text = _as_rendered(full, cursor, content, known)
        spans.append((cursor, cursor + len(text) + end))
        cursor += len(text) + len(after)
    # The last turn starts where the sampler starts, whatever the template puts there.
    tail = between[-1]
    last = (prompt_length, len(full) - len(tail) + end_of_turn(tail, tokenizer))
    earlier = spans[-1][1] if spans else 0
    if not full.endswith(tail) or not earlier <= prompt_length <= len(full) - len(tail):
        raise _unclear()
    return [*spans, last]


def _unclear() -> ConfigurationError:
    return ConfigurationError(
        "The chat template does not separate the assistant's text from its own, so a loss mask "
        "would be a guess",
        expected="assistant turns rendered in order, each once",
        fix=TEMPLATE_FIX,
    )


def _template_text(messages: list[Message], tokenizer: Any, options: dict[str, Any]) -> list[str]:
    """The rendered text before, between and after the assistant turns' contents."""
    joined = "".join(message["content"] for message in messages)
    mark = "REFINER-TURN"
    while mark in joined:
        mark += "-X"
    marks: list[str] = []
    marked: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            marks.append(f"{mark}-{len(marks)}-END")
            message = {"role": "assistant", "content": marks[-1]}
        marked.append(message)
    between: list[str] = []
    rest = rendered(tokenizer, marked, "a row", **options)
    for one in marks:
        before, found, rest = rest.partition(one)
        if not found:
            raise _unclear()
        between.append(before)
    return [*between, rest]


def _as_rendered(full: str, cursor: int, content: str, after: str) -> str:
    """An earlier assistant turn's form in the rendered text (templates trim, drop thoughts)."""
    thoughtless = content.rpartition("</think>")[2]
    trimmed = [
        form
        for text in (content, thoughtless)
        for form in (text, text.strip(), text.strip("\n"), text.lstrip("\n"))
    ]
    for text in trimmed:
        if full.startswith(text + after, cursor):
            return text
    raise _unclear()


def encode_demonstration(
    row: DataRow, tokenizer: Any
) -> tuple[tuple[int, ...], tuple[bool, ...], int]:
    """Token ids and loss mask of a demonstration, and the number of ids in the prompt.

    The last turn's ids end with its end-of-turn token: text that a template puts after it (a line
    break in ChatML) is never sampled and is left out.

    Raises
    ------
    ConfigurationError
        The template does not separate the assistant's text from its own, ends turns without
        a special token, or renders prompts for sampling differently from prompts in training, or
        the tokenizer does not allow an exact mask.
    """
    pieces = _pieces_of(row, tokenizer)
    while not pieces[-1][1]:
        pieces.pop()
    ids: list[int] = []
    mask: list[bool] = []
    prompt_length = 0
    for text, loss in pieces:
        prompt_length = len(ids)
        ids += _ids(text, tokenizer)
        mask += [loss] * (len(ids) - prompt_length)
    whole = "".join(text for text, _ in pieces)
    if ids != _ids(whole, tokenizer):  # tokens would merge across a boundary of the mask
        decoded = str(tokenizer.decode(ids))
        if decoded not in (whole, unicodedata.normalize("NFC", whole)):
            raise changes_pieces("the loss mask cannot be exact to the token")
    return tuple(ids), tuple(mask), prompt_length


def encode_prompt(row: DataRow, tokenizer: Any) -> tuple[int, ...]:
    """Token ids of the prompt up to the assistant's turn."""
    return tuple(_ids(render_prompt(row, tokenizer), tokenizer))
