"""Telling somebody what becomes of runs and sweeps: by addresses that Apprise knows, by a command.

    orchestrator: views ──> watching: pauses, ends ──> messages ──> sender (another process)
    sender: messages ──> channels: addresses, command ──> what was not told: the run's event log

See ``README.md`` beside this file.
"""
