"""Checks of a plan before anything runs: files, programs, models, memory.

``sources`` (digests of what a plan depends on, and names that nothing has), ``sets`` (rubric sets,
protocols, environments: what recipes name), ``models`` (would the model fail after hours),
``resources`` (memory, time, programs).
"""
