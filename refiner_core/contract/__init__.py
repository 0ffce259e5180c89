"""The shared language: configuration, marks, fingerprints, plan, records, errors, protocols.

Torch-free, and imports nothing of ours. In order of reading: ``marks`` (identity or execution),
``sections`` and ``config`` (parts of a recipe, and the whole), ``recipes`` -> ``loading`` ->
``checks`` (from YAML to a valid configuration; ``fields`` and ``field_facts`` beside it),
``fingerprint``, ``kinds``, ``planned`` -> ``plan_builder`` -> ``plan`` (stages as values, those
that publish included), ``protocols``, ``placement`` and ``services`` (what is measured, where it
runs, who serves the judge), ``records`` and ``proofs`` (what is remembered), ``types`` (what rooms
exchange), ``files``, ``raw_rows``, ``errors``.
"""
