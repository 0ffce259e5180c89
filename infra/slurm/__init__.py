"""Jobs on Slurm: profiles of clusters, submitting through submitit, states judged by ourselves.

``profiles`` (what is special about a cluster) -> ``submission`` (a job handed over) -> ``query``
(one look at all jobs, by ``commands``) -> ``states`` (what Slurm's words mean). ``dispatcher`` is
the whole for :mod:`infra.jobs`; ``orchestrator`` is the small job that orchestrates where login
nodes kill.
"""
