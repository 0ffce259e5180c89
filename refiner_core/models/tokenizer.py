"""The tokenizer of the embedded world: whole words for our own vocabulary, bytes for the rest.

In: the word lists of :mod:`refiner_core.words`.
Out: a :class:`transformers.PreTrainedTokenizerFast` that gives back *any* text exactly.

How it works: one regular expression cuts the text into pieces (tags, syllables of names, halves
of snippet ids, words with the space before them); a piece that is in the vocabulary is one token,
and any other piece is spelled in bytes. There are no merges, no normaliser, and nothing is cleaned
up on the way back, so decoding is the concatenation of bytes.

The chat template is ChatML with Qwen3's conventions: tools in the system turn, tool results as
user turns in ``<tool_response>``, and an empty ``<think>`` block where thinking is off. That block
costs four tokens a row; in return the tiny model takes the same path as a real Qwen3: with
``enable_thinking=False`` the generation prompt is a prefix of the whole conversation, which is what
a loss mask relies on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from refiner_core import words
from refiner_core.environments.protocol import ToolSpec
from refiner_core.words import FIRST_SYLLABLES, VALUE_HEADS

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
MODEL_MAX_LENGTH = 32768

_TAGS = (
    "<snippet id=S_", "<snippet id=", "</snippet>", "<answer>", "</answer>", "<query>", "</query>",
    "<tool_output>", "</tool_output>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<tools>", "</tools>", ",S_",
)  # fmt: skip
_PIECES = (
    r" ?[A-Z][aeiou][a-z](?=[a-z]{3}(?![A-Za-z]))",  # first syllable of a name
    r"[a-z][0-9]|[A-Z][0-9]",  # half of a snippet id
    r" ?[A-Za-z]+",
    r"\n\n|\n",
    r"[0-9]",
    r" ?[^\sA-Za-z0-9]",
)

#: A message's content, also where it is a list of parts.
_TEXT = """\
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is iterable and content is not mapping -%}
{%- for part in content -%}
{%- if part.text is defined -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
CHAT_TEMPLATE = (
    _TEXT
    + """\
{%- set marks = namespace(last_user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set marks.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- text(messages[0].content) + '\\n\\n' -}}{%- endif -%}
{{- 'Call one of these tools per turn, as ' -}}
{{- '<tool_call>{"name": ..., "arguments": {...}}</tool_call>.\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + text(messages[0].content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > marks.last_user and '</think>' not in text(message.content) -%}
{{- '<think>\\n' + ((message.reasoning_content + '\\n') if message.reasoning_content else '')
    + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- text(message.content) -}}
{%- for call in (message.tool_calls or []) -%}
{%- set function = call.function if call.function else call -%}
{{- '\\n' if (message.content or not loop.first) else '' -}}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else (function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{- '<|im_start|>user' -}}
{%- endif -%}
{{- '\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""
)


def _words() -> list[str]:
    """Every piece, as text, that is one token; bytes are not among them."""
    spaced = chain(
        words.FIRST_SYLLABLES,
        words.VALUE_HEADS,
        words.VALUE_TAILS,
        words.ATTRIBUTES,
        words.SURVEY_WORDS,
        words.TEMPLATE_WORDS,
    )
    bare = chain(
        words.FIRST_SYLLABLES,
        words.SECOND_SYLLABLES,
        words.ID_HEADS,
        words.ID_TAILS,
        words.TEMPLATE_WORDS,
    )
    listed = chain(_TAGS, ["\n\n"], (f" {word}" for word in spaced), bare)
    return [word for word in dict.fromkeys(listed) if len(word) > 1]


def _as_byte_letters(text: str) -> str:
    """``text`` in the printable letters that stand for bytes in byte-level vocabularies."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in level.pre_tokenize_str(text))


def _vocabulary() -> dict[str, int]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *letters, *map(_as_byte_letters, _words())]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer from the word lists (no file is read).

    Returns
    -------
    PreTrainedTokenizerFast
        With ``<|im_end|>`` as end of sequence, ``<|endoftext|>`` as padding (on the left, for
        generation) and the chat template above.
    """
    return assemble_tokenizer(_vocabulary(), _pattern(), CHAT_TEMPLATE)


def extend_tokenizer(pieces: Sequence[str], chat_template: str) -> PreTrainedTokenizerFast:
    """The tokenizer of the embedded world with further pieces of text that are one token each.

    Ids of the tokens that it had stay what they are; new ones follow in the order given.

    Parameters
    ----------
    pieces
        Any text. Where several fit, the longest is taken; one that begins or ends with a letter
        is not found inside a longer word.
    chat_template
        Takes the place of the tokenizer's own.
    """
    vocabulary = _vocabulary()
    for token in map(_as_byte_letters, pieces):
        vocabulary.setdefault(token, len(vocabulary))
    longest_first = sorted(dict.fromkeys(pieces), key=lambda piece: (-len(piece), piece))
    pattern = "|".join([*map(_whole, longest_first), _pattern()])
    return assemble_tokenizer(vocabulary, pattern, chat_template)


def _whole(piece: str) -> str:
    """A regular expression for a piece that is no part of a longer word."""
    before = r"(?<![A-Za-z])" if piece[0].isalpha() else ""
    after = r"(?![A-Za-z])" if piece[-1].isalpha() else ""
    return before + re.sub(r"([^A-Za-z0-9\s])", r"\\\1", piece) + after


def _pattern() -> str:
    return "|".join([*(tag.replace("|", r"\|") for tag in _TAGS), *_PIECES])


def assemble_tokenizer(
    vocabulary: dict[str, int], pattern: str, chat_template: str
) -> PreTrainedTokenizerFast:
    """A tokenizer that cuts text by ``pattern``: known pieces whole, all others in bytes."""
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        model_max_length=MODEL_MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


#: Parts of JSON, of calls and of the template; the longest that fits is taken.
JSON_PIECES = (
    '<tool_call>\n{"name": "', '", "arguments": {"', '", "arguments": {}}\n</tool_call>',
    '"}}\n</tool_call>', "}}\n</tool_call>", '": "', '": ["', '": [', '": {"', '": [{"', '": ',
    '", "', ', "', '"}, {"', '"], "', '"]}', '"}', '{"', "{}", "()",
    "user\n", "assistant\n", "tool\n", "system\n",
)  # fmt: skip

TOOLS_CHAT_TEMPLATE = (
    _TEXT
    + """\
{%- if tools or (messages and messages[0].role == 'system') -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages and messages[0].role == 'system' -%}{{- text(messages[0].content) -}}{%- endif -%}
{%- if tools -%}
{{- '\\n<tools>' -}}
{%- for tool in tools -%}
{%- set function = tool.function if tool.function else tool -%}
{{- '\\n' + function.name + '(' -}}
{{- (function.parameters.properties or {}).keys() | join(', ') + ')' -}}
{%- endfor -%}
{{- '\\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + text(message.content) -}}
{%- for call in (message.tool_calls or []) -%}
{%- set function = call.function if call.function else call -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else (function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role != 'system' or not loop.first -%}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
)

_ID_MARK = "S_"
#: How byte-level vocabularies write a space.
_SPACE = "\u0120"


def tools_tokenizer(words: Sequence[str], tools: Sequence[ToolSpec]) -> PreTrainedTokenizerFast:
    """The tokenizer for an environment.

    Parameters
    ----------
    words
        What its texts are made of, beside names, values and ids of the embedded world.
    tools
        All of its tools, of all domains.
    """
    bare = [_ID_MARK, *words, *VALUE_HEADS, *FIRST_SYLLABLES]
    both = [form for word in bare for form in (f" {word}", word)]
    return extend_tokenizer([*JSON_PIECES, *_names(tools), *both], TOOLS_CHAT_TEMPLATE)


def _names(tools: Sequence[ToolSpec]) -> list[str]:
    """Names of tools and of their parameters."""
    parameters = [name for tool in tools for name in tool.parameters.get("properties", {})]
    return sorted({tool.name for tool in tools} | set(parameters))


def bare_and_spaced(tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, int]]:
    """Ids of the tokens that are a word without a space, each with the id of it with one."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return sorted(
        (index, vocabulary[_SPACE + token])
        for token, index in vocabulary.items()
        if len(token) > 1 and _SPACE + token in vocabulary
    )
