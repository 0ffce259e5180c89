"""Whole campaigns in virtual time, under faults drawn from a seed.

The campaign, its observer, the reconciler, the workspace, the checkpoint store and the worker's
:class:`~infra.attempt.attempt.AttemptRun` are the real ones, on real files. Simulated are what
they stand on: the clock and the processes (:mod:`.world`), the scheduler (:mod:`.slurm`), the room
on the disk (:mod:`.disk`), what a stage computes (:mod:`.worker`) and the people
(:mod:`.campaigns`). What must hold is checked by :mod:`.invariants`, from the files alone;
:mod:`.mutations` shows that the checks notice deliberate bugs.

    python -m tests.prove.simulation --seed 17 --verbose
"""
