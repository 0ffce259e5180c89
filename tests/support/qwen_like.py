"""A tokenizer with merges and a chat template that does what Qwen3's does, in words of our own.

What matters of it: thoughts and empty think blocks stand before the last assistant turn alone;
successive tool messages share one user turn; with ``enable_thinking=False`` the generation prompt
ends with an empty think block; the tags of thoughts, calls and tool results are tokens that are
added, but not special.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer with <tool_call>\\n{"name": .., "arguments": {..}}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set seen.query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > seen.query and loop.last %}
            {{- '<think>\\n\\n</think>\\n\\n' }}
        {%- endif %}
        {{- said + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

_CORPUS = [
    '{"name": "get_order", "arguments": {"order": "A1"}} order orders ordered get getting',
    "The order is there.\nThe user asks for it.\n\nsystem user assistant name arguments tools",
] * 20


def qwen_like(more: Sequence[str] = (), size: int = 330) -> PreTrainedTokenizerFast:
    """Trained on two lines, so that words merge in several steps; bytes spell the rest. With
    ``more`` texts and a larger size, those texts are short."""
    core = Tokenizer(models.BPE())
    # Line breaks merge with what stands before them, as in Qwen's vocabulary.
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(more))
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        [*_CORPUS, *more],
        trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.add_special_tokens(list(SPECIAL))
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
