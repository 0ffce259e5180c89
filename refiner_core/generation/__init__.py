"""Sampling: prompts as token ids go in, completions with their log-probabilities come out.

``load`` (models by reference), ``limits`` and ``sampling`` (one token), ``batches`` ->
``transformers_backend`` with ``shared_cache`` (prompts sampled several times); for conversations
``turns`` with ``slots``, ``slot_cache`` and ``prefixes``, or ``lockstep`` over a generator that
knows none; ``vllm`` is the same over HTTP. ``text`` is what a completion says, ``reporting`` how
far one is.
"""
