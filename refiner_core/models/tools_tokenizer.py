"""The tokenizer of the recipe `tiny-tools`: that of the embedded world, with tool calls in it.

In: an environment's words and tools. Out: a tokenizer that gives back any text exactly, whose old
tokens keep their ids, and in which a tool call takes about ten tokens.

New tokens are of three kinds: the parts of JSON that stand between names and values in a call or a
result, such as ``", "arguments": {"`` (so a name stands two tokens before the value that
belongs to it, wherever it stands); names of tools and parameters; and the environment's words, each
with and without the space before it. Ids, names and values of the world keep their two tokens: what
must be copied is made of parts that the base model knows.

The chat template is ChatML without a thinking block (the model does not think), tool results under
a role of their own, and tools as ``name(parameter, parameter)``: their schemas would fill half of
the conversation. ``enable_thinking`` changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from refiner_core.environments.protocol import ToolSpec
from refiner_core.models.tokenizer import extend_tokenizer
from refiner_core.words import FIRST_SYLLABLES, VALUE_HEADS

#: Parts of JSON, of calls and of the template; the longest that fits is taken.
JSON_PIECES = (
    '<tool_call>\n{"name": "', '", "arguments": {"', '", "arguments": {}}\n</tool_call>',
    '"}}\n</tool_call>', "}}\n</tool_call>", '": "', '": ["', '": [', '": {"', '": [{"', '": ',
    '", "', ', "', '"}, {"', '"], "', '"]}', '"}', '{"', "{}", "()",
    "user\n", "assistant\n", "tool\n", "system\n",
)  # fmt: skip

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is iterable and content is not mapping -%}
{%- for part in content -%}
{%- if part.text is defined -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
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
    return extend_tokenizer([*JSON_PIECES, *_names(tools), *both], CHAT_TEMPLATE)


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
