"""Sampling: prompts as token ids go in, completions with their log-probabilities come out.

``load`` (models by reference), ``completions`` (what all samplers refuse, where texts end, what a
completion says, turns over a generator that knows none), ``sampling`` (one token, and which
requests go together) -> ``transformers_backend`` (prompts sampled several times); for conversations
``turns``; ``vllm`` is the same over HTTP. ``reporting`` tells how far one is.
"""
