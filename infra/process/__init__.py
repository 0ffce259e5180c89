"""Processes that must not outlive this one: trainers, servers, ranks, and all that they start.

``child`` starts one under ``minder``, a process of its own that kills everything when its parent is
gone, and ends what an earlier attempt has left all the same, known by a mark in its environment.
"""
