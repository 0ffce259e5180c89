"""Nightly evaluations: their files, their nights, and which change is more than noise.

    nightly file ── definition ──> Nightly, Schedule ──> nights (dates of a cron line)
    rows of the history ── changes ──> Series (checkpoint x protocol x metric)
    Series + the canary's ── changes ──> Change (model, drift, unclear; recovery) ── page ──> HTML

Pure: reads its arguments and nothing else. The *canary* is one frozen checkpoint that is sampled
and judged afresh every night: whatever moves it is not a change of a model.
"""
