"""What keeps the house in shape: the part of ``make lint`` that ruff and mypy do not know.

In order of reading: ``source`` (the files as syntax trees), then one module a question, each of
which takes the source and gives findings: ``arrows`` (who may import whom), ``sizes`` (modules,
functions, folders), ``marks`` (docstrings, fields of configuration, prints), ``use`` (what nobody
refers to) and ``copies`` (functions written twice). ``budget.toml`` lists what may stay as it is,
with reasons; it only gets shorter: an entry that is no longer needed is a finding too.
"""
