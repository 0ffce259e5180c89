"""Nightly evaluations at work: from a file and a clock to numbers, alerts and a page.

    flows/cli/nightly ──> files ──> night ── checkpoints (which weights) ──> plans ──> work
          serving (Prefect's clock)    │        harvest: evaluations ──> rows of the history
                                       │        late: nights that nobody has worked on
                                       └──> reading: history ──> changes ──> alerting ──> channels
                                                         └──> page

Prefect is a picture and a clock here: which night is done, and what has been told, is said by the
workspace's own records. `refiner nightly run` from cron does the same without it.
"""
