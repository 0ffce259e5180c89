"""The loop that brings the world to a plan: looks, decides, acts; and says why attempts ended.

One round: ``observe`` (what lives) -> ``reconcile`` (a pure function: ``union`` of plans, records,
observed -> ``actions``) -> ``acting`` (submit, close, stop) and ``room_keeping`` (a full disk) ->
``views`` (how it looks). ``orchestrator`` goes round until all is done; ``member`` is one of the
runs that it works on, as ``sources`` gives them. Read only: ``explain`` (what would happen),
``history`` and ``timeline`` (what did).
"""
