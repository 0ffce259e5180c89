"""Calls of `refiner run`: begun, worked on, shown, detached, cancelled.

``calls`` carries one out, from its recipe or its record to its end, with ``showing`` (its
orchestrator, and requests to stop) and ``console`` (its progress); ``background`` leaves one to a
process or a job, and starts what shows it in Prefect; ``cancelling`` ends it; ``status``, ``logs``
and ``following`` read how it stands from records alone.
"""
