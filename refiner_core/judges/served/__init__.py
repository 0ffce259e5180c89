"""How questions reach servers: who is asked, how often, and what is done while nobody answers.

::

    engine (items, tries) ─> asking (one request) ─> http.client ─> server
       │                       ├ http.fleet (who is asked next), http.breaker (who is left out)
       │                       ├ outcome (what an answer means)
       └ minder (probes,       └ usage (what was counted)
         pauses, deadlines)

Knows nothing of prompts: what a call says and how a reply is read is
:mod:`refiner_core.judges.calls`'s business.
"""
