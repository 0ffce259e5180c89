"""Other people's trainers, run and read with the same care as our own.

In: a shell command and its output folder, in any layout. Out: a process that never outlives its
attempt, checkpoints known to be complete, and an export for other stages.
``checkpoints`` (their list), ``process`` (one run of a trainer), ``runner`` (an attempt),
``exports`` (models for other stages), ``detection`` (the remains of any dead run).
"""
