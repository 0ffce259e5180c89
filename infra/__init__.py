"""The world outside: workspace, records, dispatch, disk, services, hub, tracking.

Rooms from the lowest up; each may import those before it (``tests/lint/arrows.py`` holds them to
it): ``host`` (this machine), ``store`` (the workspace), ``jobs`` (what is asked of whatever runs
them), ``judgements`` (answers of judges, kept), ``publishing`` and ``hub`` (weights into places),
``process`` (programs that must not outlive us), ``foreign`` (trainers of others), ``disk`` (room),
``tracking`` (W&B), ``slurm``, ``prefect_server``, ``attempt`` (one try from the inside),
``orchestrator`` (brings the world to a plan), ``services`` (servers of judges), ``ranks`` and
``rollouts`` (several processes, servers that sample), ``doctor``.
"""
