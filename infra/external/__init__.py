"""Other people's trainers, run and read with the same care as our own.

In: a shell command and its output folder, in any layout. Out: a process that never outlives its
attempt, checkpoints known to be complete, and an export for other stages.
``checkpoints`` (their list, also in the remains of any dead run), ``process`` (a trainer, and an
attempt with it), ``exports`` (models for other stages).
"""
