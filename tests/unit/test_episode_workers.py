"""Threads for tools: one that hangs holds nobody up, and does not keep a process from ending."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from refiner_core.environments.episodes import Workers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def workers() -> Iterator[Callable[[int], Workers]]:
    made: list[Workers] = []

    def make(count: int) -> Workers:
        made.append(Workers(count))
        return made[-1]

    yield make
    for one in made:
        one.abandon()


def all_of(workers: Workers, count: int) -> list[Any]:
    ended: list[Any] = []
    until = time.monotonic() + 30
    while len(ended) < count and time.monotonic() < until:
        ended += workers.ended(1.0)
    assert len(ended) == count
    return ended


def test_urgent_work_is_done_before_what_has_waited_longer(
    workers: Callable[[int], Workers],
) -> None:
    pool, order, free = workers(1), [], threading.Event()
    pool.submit(0, lambda: free.wait(30), 30.0)
    for key in (1, 2):
        pool.submit(key, lambda key=key: order.append(key), 30.0, urgent=False)
    for key in (3, 4):
        pool.submit(key, lambda key=key: order.append(key), 30.0)
    free.set()
    all_of(pool, 5)
    assert order == [3, 4, 1, 2]


def test_late_work_is_told_once_and_its_place_is_taken(workers: Callable[[int], Workers]) -> None:
    pool, free, back = workers(1), threading.Event(), threading.Event()
    for key in (1, 2):
        pool.submit(key, lambda: free.wait(30), 0.1, abandoned=back.set)
    pool.submit(3, lambda: "done", 30.0)
    ended = {one.key: one for one in all_of(pool, 3)}
    assert [ended[key].late for key in (1, 2, 3)] == [True, True, False]
    assert not back.is_set()
    free.set()
    assert back.wait(30), "what comes back late is told so, to clean up after itself"
    assert pool.ended(0.2) == []


def test_no_more_threads_than_asked_for_and_none_afterwards() -> None:
    before, free = set(threading.enumerate()), threading.Event()
    pool = Workers(3)

    def new() -> set[threading.Thread]:
        # Not a count: a thread of a test before this one may end meanwhile.
        return set(threading.enumerate()) - before

    for key in range(10):
        pool.submit(key, lambda: free.wait(30), 30.0)
    assert len(new()) == 3
    free.set()
    all_of(pool, 10)
    for thread in new():
        thread.join(30)
    assert not new()


def test_a_tool_that_hangs_does_not_keep_the_process_from_ending() -> None:
    code = (
        "import threading\n"
        "from refiner_core.environments.episodes import Workers\n"
        "pool = Workers(1)\n"
        "pool.submit(1, threading.Event().wait, 0.05)\n"
        "print([one.late for one in pool.ended(30)])\n"
        "pool.abandon()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "[True]"), ended.stderr
