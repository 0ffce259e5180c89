"""Jobs: what is asked of whatever runs them, this machine's own, and what they run.

``protocol`` says what a job is; ``dispatch`` picks who runs it (``local`` here, :mod:`infra.slurm`
elsewhere); ``worker_command`` is what it runs. ``signals``, ``failures`` and ``restart``: who asked
it to end, why it ended, and which attempt a second start goes on with. ``niceness`` lets it give
way.
"""
