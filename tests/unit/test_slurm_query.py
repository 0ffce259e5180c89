"""Queries of a scheduler: rare, all jobs at once, and never wrongly certain."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from infra.slurm.scheduler import (
    LONGEST_PAUSE_S,
    Answer,
    JobQuery,
    Row,
    SchedulerView,
    SlurmUnavailable,
)
from infra.slurm.states import JobFacts


@dataclass
class Scheduler:
    """Says what it is told to, and keeps count."""

    live: dict[str, dict[str, str]] = field(default_factory=dict)
    remembered: dict[str, dict[str, str]] = field(default_factory=dict)
    recorded: list[Row] = field(default_factory=list)
    accounting: bool = True
    away: bool = False
    asked: list[str] = field(default_factory=list)

    def queue(self, users: Iterable[str]) -> list[Row]:
        self._count("queue")
        return [{"id": i, "user": "0", "name": f"name-{i}", **job} for i, job in self.live.items()]

    def shown(self, ids: Sequence[str], names: Sequence[str] = ()) -> list[Row]:
        self._count("shown")
        rows = [
            {"id": i, "user": "0", "name": f"name-{i}", **j} for i, j in self.remembered.items()
        ]
        return [r for r in rows if r["id"] in ids or r["name"] in names]

    def accounts(self, ids: Sequence[str], names: Sequence[str] = ()) -> list[Row] | None:
        self._count("accounts")
        if not self.accounting:
            return None
        recorded = [{"user": "0", **r} for r in self.recorded]
        wanted = [r for r in recorded if r["id"].partition(".")[0] in ids]
        return [*wanted, *(r for r in recorded if r["name"] in names)]

    def cancel(self, job_id: str) -> None: ...

    def signal(self, job_id: str, name: str) -> bool:
        return True

    def release(self, job_id: str) -> None: ...

    def _count(self, what: str) -> None:
        self.asked.append(what)
        if self.away:
            raise SlurmUnavailable(f"{what} gave no answer")


class World:
    """A view, its scheduler, and a clock that is set by hand."""

    def __init__(self, poll_s: float = 10.0) -> None:
        self.now, self.scheduler = 0.0, Scheduler()
        self.view = SchedulerView(
            self.scheduler, poll_s, patience=(3, 15.0), clock=lambda: self.now
        )

    def look(self, *wanted: JobQuery, after_s: float = 10.0) -> list[Answer]:
        self.now += after_s
        answers = self.view.look(wanted)
        return [answers[w.key] for w in wanted]


def job(number: str | None, name: str = "", task: int | None = None) -> JobQuery:
    return JobQuery(number, name or f"name-{number}", task, "0")


def state(answer: Answer) -> str:
    return answer.state if isinstance(answer, JobFacts) else answer or "unknown"


@pytest.fixture
def world() -> World:
    return World()


def test_a_thousand_jobs_cost_one_query_per_poll(world: World) -> None:
    wanted = [job(str(n)) for n in range(1000)]
    world.scheduler.live = {str(n): {"state": "RUNNING"} for n in range(1000)}
    for _ in range(100):  # half a second apart: five polls
        answers = world.look(*wanted, after_s=0.5)
    assert {state(a) for a in answers} == {"RUNNING"}
    assert world.scheduler.asked == ["queue"] * 5


def test_a_job_just_submitted_is_live_until_the_next_answer(world: World) -> None:
    world.scheduler.live = {"1": {"state": "RUNNING"}}
    world.look(job("1"))
    world.view.submitted("2", "name-2")
    assert state(world.look(job("2"), after_s=0.1)[0]) == "PENDING"
    world.scheduler.live["2"] = {"state": "RUNNING"}
    assert state(world.look(job("2"))[0]) == "RUNNING"


def test_an_ended_job_is_asked_for_once(world: World) -> None:
    world.scheduler.remembered = {"1": {"state": "FAILED", "exit_code": "3:0"}}
    world.scheduler.recorded = [
        {"id": "1", "state": "FAILED", "name": "name-1"},
        {"id": "1.0", "state": "OUT_OF_MEMORY", "name": "env"},
    ]
    (answer,) = world.look(job("1"))
    assert (answer.exit_code, answer.out_of_memory) == (3, True)
    world.look(job("1"))
    world.look(job("1"))
    assert world.scheduler.asked == ["queue", "shown", "accounts", "queue", "queue"]


def test_a_job_requeued_by_hand_is_live_again(world: World) -> None:
    world.scheduler.remembered = {"1": {"state": "FAILED"}}
    assert state(world.look(job("1"))[0]) == "FAILED"
    world.scheduler.live = {"1": {"state": "PENDING"}}
    assert state(world.look(job("1"))[0]) == "PENDING"
    world.scheduler.live, world.scheduler.remembered = {}, {"1": {"state": "COMPLETED"}}
    assert state(world.look(job("1"))[0]) == "COMPLETED"


def test_an_unknown_job_is_lost_after_several_answers(world: World) -> None:
    assert [state(world.look(job("1"))[0]) for _ in range(3)] == ["unknown", "unknown", "lost"]


def test_answers_in_quick_succession_do_not_make_it_lost() -> None:
    world = World(poll_s=1.0)
    assert {state(world.look(job("1"), after_s=1.0)[0]) for _ in range(15)} == {"unknown"}
    assert state(world.look(job("1"), after_s=1.0)[0]) == "lost"


def test_late_accounting_of_a_lost_job_is_ignored(world: World) -> None:
    world.scheduler.recorded = [{"id": "1", "state": "RUNNING", "name": "name-1"}]
    assert state(world.look(job("1"))[0]) == "unknown"
    world.scheduler.recorded = [{"id": "1", "state": "TIMEOUT", "name": "name-1"}]
    assert state(world.look(job("1"))[0]) == "TIMEOUT"


def test_the_controllers_memory_replaces_accounting(world: World) -> None:
    world.scheduler.accounting = False
    world.scheduler.remembered = {"1": {"state": "NODE_FAIL"}}
    assert state(world.look(job("1"))[0]) == "NODE_FAIL"
    world.look(job("1"), job("2"))
    world.look(job("1"), job("2"))
    assert world.scheduler.asked.count("accounts") == 1  # it is off, and not asked every time


def test_an_absent_scheduler_is_polled_less(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.scheduler.live = {"1": {"state": "RUNNING"}}
    world.scheduler.remembered = {"2": {"state": "COMPLETED"}}
    world.look(job("1"), job("2"))
    world.scheduler.away, world.scheduler.live = True, {}
    world.scheduler.asked.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(600):
            one, two = world.look(job("1"), job("2"), after_s=1.0)
            if world.scheduler.asked:
                assert (state(one), state(two)) == ("unknown", "COMPLETED")
    assert len(caplog.records) == 1
    assert len(world.scheduler.asked) <= 4 + 600 / LONGEST_PAUSE_S
    world.scheduler.away, world.scheduler.live = False, {"1": {"state": "RUNNING"}}
    assert state(world.look(job("1"), after_s=LONGEST_PAUSE_S)[0]) == "RUNNING"


def test_a_job_without_id_is_found_by_its_name(world: World) -> None:
    world.scheduler.live = {
        "7": {"state": "RUNNING", "name": "refiner-x"},
        "8_0": {"state": "PENDING", "name": "refiner-array"},
        "8_1": {"state": "RUNNING", "name": "refiner-array"},
    }
    one, task = world.look(job(None, "refiner-x"), job(None, "refiner-array", 1))
    assert (one.job_id, task.job_id) == ("7", "8_1")


@pytest.mark.parametrize("accounting", [True, False])
def test_an_ended_job_is_found_by_its_name(world: World, accounting: bool) -> None:
    row = {"state": "COMPLETED", "name": "refiner-x"}
    world.scheduler.accounting = accounting
    if accounting:
        world.scheduler.recorded = [{"id": "7", **row}]
    else:
        world.scheduler.remembered = {"7": row}
    (answer,) = world.look(job(None, "refiner-x"))
    assert (answer.job_id, answer.state) == ("7", "COMPLETED")
