"""Jobs on Slurm: profiles of clusters, submitting through submitit, states judged by ourselves.

``profiles`` (special features of a cluster) -> ``submission`` (a job handed over; the orchestrator
may be one) -> ``scheduler`` (one look at all jobs) -> ``states`` (the meaning of Slurm's words).
``dispatcher`` is the whole for :mod:`infra.jobs`.
"""
