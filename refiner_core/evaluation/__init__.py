"""Evaluation: weights and held-out prompts go in, numbers with intervals and evidence come out.

``protocol`` (what makes numbers comparable) -> ``run`` (answers) or ``episodes`` (agents) ->
``metrics`` (the rows behind every number, and which numbers there are) ->
``results`` (also of two models side by side), by ``statistics``; ``power`` says what could be seen,
``metric_names`` holds what numbers are called, and pass@k.
"""
