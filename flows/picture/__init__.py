"""The picture of a campaign in Prefect, drawn by a process of its own.

The orchestrator tells ``feed`` lines of JSON; ``drawer`` is the process that hears them and runs
``flow``, whose task runs ``poster``, ``news`` and ``posted`` (reports) fill with ``artifacts``.
``leftovers`` closes what a killed one left open. Only the process that draws imports Prefect.
"""
