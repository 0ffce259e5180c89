"""Telling somebody what becomes of runs and sweeps: by a command, a webhook, an event in Prefect.

    orchestrator: views ──> watching: pauses, ends ──> message ──┬──> infra/store/notices
                                                                 └──> courier (another process)
    courier: messages ──> channels: command, webhook, event ──> delivered, or why not

See ``README.md`` beside this file.
"""
