"""The workspace: where everything lies in it, its records, files that are whole or not there.

In order of reading: ``atomic`` (a write is there completely, or the disk is full); ``layout``
(paths, and nothing else knows them); ``checkpoints`` (and what may not be deleted); ``records`` and
``stage_records`` behind one door, ``workspace``; ``sweep_records`` and ``nightly_records``;
``traces`` (metrics and rollouts); ``orchestrators`` (processes that work on runs, leases of
servers); ``provenance`` (pinned code, where results come from, what was proven of them).
"""
