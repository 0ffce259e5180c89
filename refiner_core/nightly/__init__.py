"""Nightly evaluations: their files, their nights, and the detection of significant changes.

    nightly file ── definition ──> Nightly, Schedule ──> nights (dates of a cron line)
    rows of the history ── changes ──> Series (checkpoint x protocol x metric)
    Series + the canary's ── changes ──> Change (model, drift, unclear; recovery) ── page ──> HTML

Pure: reads its arguments and nothing else. The *canary* is one frozen checkpoint that is sampled
and judged anew every night: a change of its numbers is not a change of a model.
"""
