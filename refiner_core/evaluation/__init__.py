"""Evaluation: weights and held-out prompts go in, numbers with intervals and evidence come out.

``protocol`` (what makes numbers comparable) -> ``run`` (answers) or ``episodes`` (agents;
``attempts``, ``do_nothing``, ``pass_at_k``) -> ``samples`` (the rows behind every number) ->
``results``, by ``statistics`` and ``crossed``. ``compare`` sets two models side by side, ``power``
says what could be seen; ``metrics`` and ``names`` are what numbers are called.
"""
