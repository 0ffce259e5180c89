"""The wiring: Prefect flows, the `refiner` command, recipes, and the worker that a job runs.

A call goes ``cli`` -> ``checking`` (is the plan fit) -> ``running`` (one run) or ``sweeping`` (its
arms), with its messages (``notifying``); ``api`` names the functions of all rooms for scripts. From
Prefect it comes by the flows ``pipeline`` and ``sweep``, which ``serving`` deploys; a call from a
terminal is shown by the same flows, in the process ``attach`` (``terminal_runs``). Jobs come in by
``worker`` and ``ranks`` and do what ``stages`` says. On what is there: ``publishing``, ``cards``,
``reporting``, ``rescoring``, ``diffing``, ``why``, ``proving``, ``nightly``, ``frames``; what
stages have left is found by ``stored``; on the machine: ``disk``, ``doctor``, ``certify``,
``judges``, ``tracking``, ``adopting``.
``starting`` makes recipes. The order in which rooms may import each other stands in
``tests/lint/arrows.py``.
"""
