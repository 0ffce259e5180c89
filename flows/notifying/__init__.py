"""Notifications about runs and sweeps: by addresses of Apprise, or by a command.

    orchestrator: views ──> watching: pauses, ends ──> messages ──> sender (another process)
    sender: messages ──> channels: addresses, command ──> failures: the run's event log

See ``README.md`` beside this file.
"""
