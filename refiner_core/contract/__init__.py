"""The shared language: configuration, marks, fingerprints, plan, records, errors, protocols.

Torch-free, and imports nothing of ours. In order of reading: ``marks`` (identity or execution),
``config`` (the door to all ``*_config`` classes), ``recipe_files`` -> ``loading`` -> ``checks``
(from YAML to a valid configuration; ``overrides``, ``interpolations``, ``origins`` and
``field_facts`` beside it), ``fingerprint``, ``planned`` -> ``plan_builder`` -> ``plan`` (stages as
values), ``protocols`` and ``publications`` (what is measured and published), ``records`` (what is
remembered), ``types`` and ``views`` (what rooms exchange), ``errors``.
"""
