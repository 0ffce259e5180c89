"""Disk as a resource: room and the lack of it, quotas, reservations, what can be reclaimed.

What there is: ``mounts`` of the host, ``parsers`` and ``probe`` -> ``figures``. What will be
needed: ``modelsize``, ``history`` and ``judged`` -> ``forecast``; ``ledger`` holds what saves have
reserved. What may go: ``usage``, ``copies``, ``held`` and ``caches`` -> ``stock`` -> ``reaper``.
``keeper`` puts these together for orchestrator and attempts; ``watch`` looks while something runs.
"""
