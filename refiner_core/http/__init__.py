"""Servers over HTTP: judges, rollout servers.

``client`` makes requests and returns their outcomes, and has the thread of an event loop;
``fleet`` chooses among several servers by the fewest calls in flight, and leaves out failing ones.
Independent of the content of requests.
"""
