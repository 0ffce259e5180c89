"""Sampling: from prompts as token ids to completions with their log-probabilities.

``load`` (models by reference), ``completions`` (shared checks, ends and text of completions, turns
over a generator without turns), ``sampling`` (one token; batching of requests),
``transformers_backend`` (prompts sampled several times), ``turns`` (conversations), ``vllm`` (the
same over HTTP), ``reporting`` (progress).
"""
