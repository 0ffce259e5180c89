"""Jobs on Slurm: cluster profiles, submission through submitit, and states judged by refiner.

``profiles`` (features of a cluster) -> ``submission`` (hands over a job; the orchestrator may be
one) -> ``scheduler`` (one query for all jobs) -> ``states`` (the meaning of Slurm's words).
``dispatcher`` combines them for :mod:`infra.jobs`.
"""
