"""Waiting for the end of a thread's work, so that a Ctrl-C interrupts the wait and nothing else."""

from __future__ import annotations

import threading


def wait_for(ended: threading.Event) -> None:
    """Return once ``ended`` is set.

    Not ``Thread.join``: a Ctrl-C in it makes Python take the thread for ended (bpo-45274).
    """
    while not ended.wait(1.0):
        pass
