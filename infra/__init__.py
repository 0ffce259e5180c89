"""The outside world: workspace, records, dispatch, disk, services, hub, tracking.

Packages from the lowest up; each may import those before it (checked by ``tests/lint/arrows.py``):
``host`` (this machine), ``store`` (the workspace), ``jobs`` (their interface, and those of this
machine), ``judgements`` (stored answers of judges), ``publishing`` and ``hub`` (targets of
weights), ``process`` (programs that must not outlive us), ``external`` (other trainers), ``disk``
(free space), ``tracking`` (W&B), ``slurm``, ``prefect_server``, ``attempt`` (one attempt from the
inside), ``orchestrator`` (carries out plans), ``services`` (servers of judges), ``ranks`` and
``rollouts`` (several processes, servers that sample), ``doctor``.
"""
