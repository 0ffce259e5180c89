"""Servers over HTTP: judges, rollout servers.

``client`` makes requests and says what came of them, and has the thread that an event loop runs in;
``fleet`` says which of several servers is asked next, by the fewest calls in flight, and which is
left out. Knows nothing of what is asked.
"""
