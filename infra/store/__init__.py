"""The workspace: its layout, its records, and atomic writes.

In order of reading: ``atomic`` (a write is complete, or the disk is full); ``layout`` (all paths);
``checkpoints`` (and what may not be deleted); ``records`` and ``stage_records``, combined in
``workspace``; ``sweep_records`` and ``nightly_records``; ``traces`` (metrics and rollouts);
``orchestrators`` (processes that work on runs, leases of servers); ``provenance`` (pinned code,
origin of results, proofs).
"""
