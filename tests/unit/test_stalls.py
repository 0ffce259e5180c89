"""Stalls: what a phase may take, and which rank is the cause. Virtual time, no processes."""

import random

import pytest

from infra.attempt.attempt import stall_clock
from infra.attempt.rank_watch import RankWatch
from infra.attempt.stalls import PhaseTimes, RankState, StallClock, find_laggard, merged, times_of
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.types import Progress
from tests.support.slow_runs import killed_healthy_run

CAP_S, FLOOR_S = 7200.0, 20.0


def clock_after(times: dict[str, PhaseTimes]) -> StallClock:
    clock = StallClock(0.0, CAP_S, FLOOR_S)
    clock.learn(times)
    clock.report(1, Progress(3, 10, "update"), 0.0)
    return clock


def first_stall(clock: StallClock, until_s: float, beat_s: float = 2.0) -> float | None:
    """When the clock first finds a stall."""
    now = 0.0
    while now < until_s:
        now += beat_s
        clock.beat(now)
        if clock.stall(now) is not None:
            return now
    return None


def test_a_limit_is_three_times_the_longest_silence_and_the_floor() -> None:
    often = {"update": PhaseTimes(10, 30.0)}
    assert first_stall(clock_after(often), 7300.0) == pytest.approx(3 * 30 + FLOOR_S, abs=2.1)


def test_what_was_never_completed_gets_the_most() -> None:
    assert first_stall(clock_after({}), 7300.0) == pytest.approx(CAP_S, abs=2.1)


def test_of_several_nodes_the_one_that_fell_silent_first_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, watch = 0.0, RankWatch()
    monkeypatch.setattr("infra.attempt.rank_watch.time.monotonic", lambda: now)

    def beat(*ranks: int) -> None:
        for rank in ranks:
            watch.take({"event": "beat", "rank": rank, "node": f"n{rank // 2 + 1}"})

    assert watch.node_of(None) == ""
    beat(0, 1, 2, 3)
    assert (watch.node_of(1), watch.node_of(2)) == ("n1", "n2")
    now = 60.0  # all have ended
    assert watch.node_of(None) == ""
    beat(0, 1, 3)
    assert watch.node_of(None) == "n2"


def test_a_suspended_job_or_file_system_is_no_stall() -> None:
    """The heartbeat's thread did not run for an hour either."""
    clock = clock_after({"update": PhaseTimes(10, 1.0)})
    clock.beat(2.0)
    assert clock.stall(3600.0) is None
    clock.beat(3600.0)
    assert clock.stall(3601.0) is None


def test_a_forward_pass_of_any_rank_is_a_sign_of_life_and_a_repeated_report_is_none() -> None:
    clock = clock_after({"update": PhaseTimes(10, 1.0)})
    for second in range(2, 200, 2):
        clock.beat(second)
        clock.pulse(second, second)
        assert clock.stall(second) is None
    for second in range(200, 300, 2):
        clock.beat(second)
        clock.report(1, Progress(3, 10, "update"), second)
    assert clock.stall(300.0) is not None


def test_a_save_in_the_background_excuses_nothing_else_and_is_excused_by_training() -> None:
    known = {"update": PhaseTimes(10, 1.0), "save": PhaseTimes(10, 100.0)}
    clock = clock_after(known)
    clock.saving(2, 0.0, ends=False)
    assert first_stall(clock, 1000.0) == pytest.approx(320.0, abs=2.1), "training waits for it"


def test_a_struck_limit_is_raised_for_the_same_stage_alone() -> None:
    beat = {"phases": {"update": [9, 1.0]}, "stalled": {"phase": "update", "silent_s": 60.0}}
    assert merged([times_of(beat, stalled=True)])["update"].longest_s == 60.0
    assert merged([times_of(beat, stalled=False)])["update"].longest_s == 1.0


AFTER = ["add", "gather"] * 4
#: States of ranks, and the rank that the others wait for.
LAGGARDS: dict[str, tuple[list[RankState], set[int]]] = {
    "one has not come to the collective": (
        [RankState(0, calls=9, inside="gather"), RankState(1, calls=8, place="loop (a.py:3)")],
        {1},
    ),
    "one left a collective out": (
        [
            RankState(rank, calls=9, inside=inside, recent=AFTER)
            for rank, inside in enumerate(("broadcast", "gather", "gather"))
        ],
        {0},
    ),
    "of two, the one that does what it never did": (
        [
            RankState(0, calls=9, inside="gather", recent=AFTER),
            RankState(1, calls=9, inside="add", recent=[*AFTER[:-1], "add"]),
        ],
        {1},
    ),
    "of two in a first step, the one that is further": (
        [
            RankState(0, calls=9, inside="broadcast", frames=[("a.py", 9, "f")]),
            RankState(1, calls=9, inside="gather", frames=[("a.py", 7, "f")]),
        ],
        {0},
    ),
    "only stacks tell, as in a backward pass of DeepSpeed": (
        [RankState(0, in_collective=True), RankState(1, in_collective=False)],
        {1},
    ),
    "NCCL's recorder": (
        [
            RankState(0, in_collective=True, enqueued=71, kernel="nccl:all_reduce"),
            RankState(1, in_collective=True, enqueued=70),
        ],
        {1},
    ),
    "a node is gone": (
        [
            RankState(0, calls=9, inside="gather"),
            RankState(1, host="n2", here=False, silent_s=40.0),
        ],
        {1},
    ),
    "nobody": ([RankState(r, calls=9, inside="gather") for r in range(2)], set()),
}


@pytest.mark.parametrize("case", LAGGARDS)
def test_the_rank_that_others_wait_for(case: str) -> None:
    states, ranks = LAGGARDS[case]
    found = find_laggard(states)
    assert (set(found.ranks), found.is_gone) == (ranks, case == "a node is gone")
    assert set(found.waiting) == ({s.rank for s in states} - ranks if ranks else set())


def test_slow_but_healthy_runs_are_not_killed() -> None:
    """Steps that get longer, a cold cache, long saves, a slow neighbour; more in `make prove`."""
    assert [seed for seed in range(6) if killed_healthy_run(random.Random(seed))] == []


@pytest.mark.parametrize(("kind", "limit_s"), [("sft", 20.0 + 36.0), ("command", 7200.0)])
def test_a_trainer_of_ones_own_may_be_silent(kind: str, limit_s: float) -> None:
    """A step of three seconds says nothing about how long another's script prints nothing."""
    clock = stall_clock(RecipeConfig(), kind, 0.0)
    clock.report(1, Progress(1, 9, "train"), 0.0)
    clock.report(1, Progress(1, 9, "save"), 3.0)
    assert clock.limit_s("train") == limit_s
