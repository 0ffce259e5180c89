"""Calls of `refiner run`: begun, worked on, shown, detached, cancelled.

``calls`` begins and records them, and works on one with ``showing`` (its orchestrator, and requests
to stop) and ``console`` (its progress); ``runs`` is all of that in one function each;
``background`` leaves one to a process or a job, and starts what shows it in Prefect; ``cancelling``
ends it; ``status``, ``logs`` and ``following`` read how it stands from records alone.
"""
