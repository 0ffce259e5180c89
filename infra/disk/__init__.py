"""The disk as a resource: free space, quotas, reservations, and reclaiming.

What there is: ``probe``. What will be needed: ``forecast``. What may go: ``usage`` -> ``inventory``
(the files and their protection) -> ``garbage_collection``. ``manager`` combines these for
orchestrator and attempts: it frees space, reserves it for saves, and watches it while something
runs.
"""
