"""The workspace: where everything lies in it, its records, files that are whole or not there.

In order of reading: ``atomic``, ``swap`` and ``room`` (a write is there completely, or the disk is
full); ``layout`` (paths, and nothing else knows them); ``record_files``, then the records of
stages, runs, sweeps, proofs and nights behind one door, ``workspace``; ``checkpoints`` with
``holds`` and ``marks`` (what may not be deleted, what was); ``traces`` (metrics and rollouts);
``orchestrators`` and ``leases`` (who works on what, who needs a server); ``published``,
``provenance`` and ``snapshot`` (where things come from, and where they went).
"""
