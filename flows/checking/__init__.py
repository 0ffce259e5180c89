"""What a plan is checked against before anything runs: files, programs, models, memory.

``sources`` (digests of what a plan depends on), ``names`` and ``protocol_facts`` (what recipes
name), ``model_files`` -> ``model_checks`` (would the model fail after hours), ``memory``,
``server_programs``.
"""
