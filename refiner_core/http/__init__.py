"""Servers over HTTP: judges, simulated users, rollout servers.

``client`` makes one request and says what came of it; ``loop`` is the thread that an event loop
runs in; ``fleet`` says which of several servers is asked next, by the fewest calls in flight, and
``breaker`` which is left out. Knows nothing of what is asked.
"""
