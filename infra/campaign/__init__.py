"""Brings the world to a plan: looks, reconciles, acts; and says why attempts ended.

One round: ``observe`` (what lives) -> ``reconcile`` (a pure function: plan, records, observed ->
``actions``) -> ``acting`` (submit, close, stop) and ``room_keeping`` (a full disk) -> ``views``
(how it looks). ``campaign`` goes round until all is done, ``together`` is what several campaigns of
one process share. Read only: ``explain`` (what would happen), ``history`` and ``timeline`` (what
did).
"""
