"""A workspace with a judge's server and its users, for tests of services.

    python service_bench.py FOLDER SEED     runs the plan as an orchestrator of its own

The server is :mod:`tests.support.served_judge`, the jobs that ask are
:mod:`tests.support.asking_worker`; campaigns, dispatchers, records and leases are the real ones.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from infra.jobs.dispatch import Router
from infra.orchestrator.orchestrator import Orchestrator
from infra.services.judges import ServiceStatus, services_of
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.config import JudgeConfig, ServeConfig
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.records import StageResult
from refiner_core.contract.types import StageView
from tests.support.command import wait_until
from tests.support.plans import (
    SOURCES,
    claim,
    fake_router,
    orchestrator_on,
    run_record,
    small_config,
)

SERVER = Path(__file__).with_name("served_judge.py")
WORKER = Path(__file__).with_name("asking_worker.py")


class Bench:
    """A workspace, and a judge's server that logs its starts and questions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workspace = Workspace.open(folder / "runs")
        self.log = folder / "server.jsonl"
        if not (self.workspace.root / "behaviour.json").exists():
            self.behave(questions=2)

    def behave(self, **behaviour: Any) -> None:
        """Set the behaviour of the users."""
        (self.workspace.root / "behaviour.json").write_text(json.dumps(behaviour))

    def hold(self) -> None:
        """Users keep the judge until :meth:`let_go`."""
        (self.workspace.root / "hold").touch()

    def let_go(self) -> None:
        """Let the users end."""
        (self.workspace.root / "hold").unlink()

    def command(self, *more: str) -> str:
        """A ``judge.serve_command``."""
        words = [sys.executable, "-I", "-S", str(SERVER), "--log", str(self.log), *more]
        return f"{shlex.join(words)} --host {{host}} --port {{port}} --model {{model}}"

    def plan(self, *more: str, seed: int = 1, **serve: Any) -> Plan:
        """``data → judge → grpo`` with the server's arguments ``more``; the data are done."""
        settings = ServeConfig(**{"idle_timeout_s": 0.6, "start_timeout_s": 120.0, **serve})
        judge = JudgeConfig(
            kind="openai",
            model="m",
            cache_gb=0.0,  # otherwise the second run asks nothing
            serve_command=self.command(*more),
            serve=settings,
        )
        config = replace(small_config("data", "grpo"), workspace=str(self.workspace.root))
        plan = make_plan(replace(config, seed=seed, judge=judge), SOURCES)
        data = plan.by_name["data"]
        if self.workspace.read_result(data.id) is None:
            claim(self.workspace, plan, "data")
            (self.workspace.layout.attempt(data.id, 1).output).mkdir(parents=True)
            done = StageResult(1, 1, "attempts/0001/output", (), {}, {}, 1.0, now_text())
            self.workspace.publish_result(data.id, done)
        return plan

    def campaign(self, plan: Plan, router: Router | None = None) -> Orchestrator:
        """An orchestrator of the plan, not started yet."""
        router = router or fake_router(self.workspace, str(WORKER))
        return orchestrator_on(plan, self.workspace, router, run=run_record(self.workspace, plan))

    def run(self, plan: Plan) -> dict[str, StageView]:
        """Run the plan to its end."""
        campaign = self.campaign(plan)
        campaign.start()
        return campaign.join()

    def lines(self, what: str) -> list[Any]:
        """Values of one kind in the log of all servers."""
        if not self.log.exists():
            return []
        notes = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [note[what] for note in notes if what in note]

    @property
    def pids(self) -> list[int]:
        """The processes of all servers, in order of their start."""
        return self.lines("pid")

    def alive(self) -> list[int]:
        """Which of them live."""
        return [pid for pid in self.pids if psutil.pid_exists(pid) and not _is_zombie(pid)]

    def wait_for_questions(self, count: int) -> None:
        """Until a server has been asked so often (of that two to check it)."""
        wait_until(lambda: len(self.lines("asked")) >= count, f"{count} questions")

    def service(self) -> ServiceStatus:
        """The one server as `refiner judge servers` lists it."""
        (found,) = services_of(self.workspace)
        return found

    def wait_ended(self) -> ServiceStatus:
        """Until nothing of the server runs."""
        outcome = "stages/serve-*/attempts/*/outcome.json"
        tries = "stages/serve-*/attempts/*/intent.json"
        root = self.workspace.root
        wait_until(
            lambda: len([*root.glob(outcome)]) == len([*root.glob(tries)]), "the server's end"
        )
        assert self.alive() == []
        return self.service()

    def end(self) -> None:
        """Release users and kill servers."""
        (self.workspace.root / "hold").unlink(missing_ok=True)
        for pid in self.alive():
            psutil.Process(pid).kill()


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


if __name__ == "__main__":
    there = Bench(Path(sys.argv[1]))
    there.run(there.plan(seed=int(sys.argv[2])))
