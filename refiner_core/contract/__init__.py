"""The shared language: configuration, marks, fingerprints, plan, records, errors, protocols.

Torch-free, and imports none of our other packages. In order of reading: ``marks`` (identity or
execution), ``sections`` and ``config`` (parts of a recipe, and the whole), ``recipes`` ->
``loading`` -> ``checks`` (from YAML to a valid configuration; ``fields`` and ``field_facts`` beside
it), ``fingerprint``, ``kinds``, ``planned`` -> ``plan_builder`` -> ``plan`` (stages as values, with
publications), ``protocols``, ``placement`` and ``services`` (measurement, GPUs, judges' servers),
``monitoring`` (gold beside the training reward), ``records`` and ``proofs`` (stored values),
``types`` (values and protocols between packages), ``files``, ``raw_rows``, ``errors``.
"""
