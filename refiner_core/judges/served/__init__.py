"""How questions reach servers: who is asked, how often, and what is done while nobody answers.

::

    engine (items, tries, pauses) ─> client (one HTTP request) ─> server
       └─ fleet (who is asked next; breakers)   └─ usage (what was counted)

Knows nothing of prompts: what a call says and how a reply is read is
:mod:`refiner_core.judges.calls`'s business.
"""
