"""Nightly evaluations: from a file and a clock to metrics, alerts and a page.

    flows/cli/serve ──> night ── checkpoints (weights, and the plan of each)
    flow (Prefect's clock)    └──> history: rows ──> changes ──> alerts ──> channels; the page

Prefect only shows the nights and starts them: the workspace's records decide which night is done
and which alerts were sent. `refiner nightly run` from cron works without Prefect.
"""
