"""The loop that brings the world to a plan: looks, decides, acts; and says why attempts ended.

One round: ``observe`` (what lives) -> ``reconcile`` (a pure function: union of plans, records,
observed -> actions) -> ``acting`` (submit, close, stop), while ``waiting`` knows what pauses for
room or for a system that does not answer. ``orchestrator`` goes round until all is done, and shows
how it looks; ``members`` are the runs that it works on, as a source gives them. Read only:
``timeline`` (what went wrong, and what it cost).
"""
