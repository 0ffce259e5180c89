"""Checks of the source tree that ruff and mypy do not have; a part of ``make lint``.

In order of reading: ``source`` (the files as syntax trees), then one module per check, each of
which takes the source and gives findings: ``arrows`` (which packages and layers may import which),
``sizes`` (modules, functions, folders), ``marks`` (docstrings, configuration fields, prints),
``use`` (dead code) and ``copies`` (repeated functions). ``budget.toml`` lists exceptions with their
reasons; an entry that is no longer needed is a finding too.
"""
