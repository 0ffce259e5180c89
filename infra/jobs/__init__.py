"""Jobs: what is asked of whatever runs them, this machine's own, and what they run.

``protocol`` says what a job is, and what it runs; ``dispatch`` picks who runs it: this machine, or
:mod:`infra.slurm`. ``signals`` and ``failures``: who asked it to end, which attempt a second start
goes on with, and why it ended. ``give_way`` is what a job becomes that others are not to wait for.
"""
