"""The loop that brings a workspace to a plan: observe, decide, act; and its incidents.

One round: ``observe`` (what runs) -> ``reconcile`` (a pure function: union of plans, records,
observations -> actions) -> ``executor`` (submit, close, stop); ``waiting`` tracks pauses for disk
space and for systems that do not answer. ``orchestrator`` repeats rounds until all stages have
ended and publishes their state; ``members`` are the runs that it works on. Read only:
``timeline`` (incidents and their cost).
"""
