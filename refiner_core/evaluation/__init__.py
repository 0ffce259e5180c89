"""Evaluation: from weights and held-out prompts to numbers with intervals and evidence.

``protocol`` (comparability of numbers) -> ``run`` (answers) or ``episodes`` (agents) ->
``metrics`` (all metrics, and the rows behind every number) -> ``results`` (also comparisons of two
models), using ``statistics``; ``power`` computes detectable effects, ``metric_names`` parses names
of metrics, and computes pass@k.
"""
