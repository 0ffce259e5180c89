"""Nightly evaluations: what a file says, which nights there are, what is change and what is noise.

    nightly file ── definition ──> Nightly ── schedule ──> nights (dates of a cron line)
    rows of the history ── series ──> Series (checkpoint x protocol x metric)
    Series + the canary's ── changes ──> Change (model, drift, unclear; recovery) ── page ──> HTML

Pure: reads its arguments and nothing else. The *canary* is one frozen checkpoint that is sampled
and judged afresh every night: whatever moves it is not a change of a model.
"""
