"""Disk as a resource: room and the lack of it, quotas, reservations, what can be reclaimed.

What there is: ``parsers`` -> ``probe``. What will be needed: ``history`` (and sizes of models) ->
``forecast``. What may go: ``usage`` -> ``inventory`` (what lies there, and what protects it) ->
``reaper``. ``keeper`` puts these together for orchestrator and attempts: it makes room, reserves it
for saves, and watches it while something runs.
"""
