"""Processes that must not outlive this one: trainers, servers, ranks, and their children.

``child`` starts one under ``watchdog``, a process of its own that kills everything when its parent
is gone; it also ends leftovers of earlier attempts, found by a mark in their environment.
"""
