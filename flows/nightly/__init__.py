"""Nightly evaluations at work: from a file and a clock to numbers, alerts and a page.

    flows/cli/serve ──> night ── checkpoints (which weights, and the plan of each)
    flow (Prefect's clock)    └──> history: rows ──> changes ──> alerts ──> channels; the page

Prefect is a picture and a clock here: which night is done, and what has been told, is said by the
workspace's own records. `refiner nightly run` from cron does the same without it.
"""
