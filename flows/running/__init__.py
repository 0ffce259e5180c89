"""Calls of `refiner run`: begin, work on, show, detach, cancel.

``calls`` carries out a call, from its recipe or record to its end, with ``foreground``
(orchestrator, requests to stop) and ``console`` (progress). ``background`` hands a call to a
process or a Slurm job, and starts the process that shows it in Prefect. ``cancelling`` ends a call.
``status``, ``logs`` and ``following`` read its status from records alone.
"""
