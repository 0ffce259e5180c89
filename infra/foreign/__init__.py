"""Other people's trainers, run and read with the same care as our own.

In: a shell command and what it leaves in a folder, in whatever layout. Out: a process that never
outlives its attempt, checkpoints that are known to be whole, and an export for other stages.
``checkpoints`` (which there are), ``process`` (one run of a trainer), ``runner`` (an attempt),
``exports`` (what other stages read), ``sightings`` (what a dead run of anybody's has left).
"""
