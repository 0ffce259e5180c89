"""The wiring: Prefect flows, the `refiner` command, recipes, and the worker that a job runs.

A call goes ``cli`` or ``api`` -> ``checking`` (is the plan fit) -> ``running`` (one run) or
``sweeping`` (its arms), with its ``picture`` in Prefect and its messages (``notifying``). From
Prefect it comes by the flows ``pipeline`` and ``sweep``, which ``serving`` deploys. Jobs come in by
``worker`` and ``ranks`` and do what ``stages`` says. On what is there: ``publishing``, ``cards``,
``reporting``, ``rescoring``, ``diffing``, ``why``, ``proving``, ``nightly``, ``frames``.
``starting`` makes recipes. The order in which rooms may import each other stands in
``tests/lint/arrows.py``.
"""
