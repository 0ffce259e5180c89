"""Services of judges: start before their users, sharing, recovery and end.

The servers are real processes that ask for a key (:mod:`tests.support.served_judge`); their users
are jobs without a model (:mod:`tests.support.asking_worker`).
"""

import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from infra.jobs.dispatch import LocalDispatcher, Router
from infra.jobs.dispatcher import WorkerCommand
from infra.slurm.dispatcher import SlurmDispatcher
from infra.slurm.profiles import Profile
from refiner_core.contract.config import Resources
from refiner_core.contract.plan import make_plan
from refiner_core.contract.types import StageView
from tests.support import service_bench
from tests.support.command import Stage, environment, refiner, wait_until
from tests.support.plans import SOURCES
from tests.support.service_bench import WORKER, Bench
from tests.support.slurm_cluster import Cluster


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """An empty workspace; no server is left when the test ends."""
    made = Bench(tmp_path)
    yield made
    made.end()


def states(views: dict[str, StageView]) -> dict[str, str]:
    """Stage name -> how it ended."""
    return {name: view.state for name, view in views.items()}


def test_a_server_answers_before_the_trainer_begins_and_ends_when_idle(bench: Bench) -> None:
    plan = bench.plan("--startup", "0.3")
    assert states(bench.run(plan)) == {"data": "skipped", "judge": "done", "grpo": "done"}
    layout = bench.workspace.layout
    endpoint = layout.attempt(plan.by_name["judge"].id, 1).endpoint
    claimed = layout.attempt(plan.by_name["grpo"].id, 1).intent
    assert endpoint.stat().st_mtime <= claimed.stat().st_mtime, "GPUs were taken too early"
    assert "it was idle" in bench.wait_ended().reason
    again = bench.run(plan)
    assert states(again) == {"data": "skipped", "judge": "skipped", "grpo": "skipped"}
    assert len(bench.pids) == 1, "a finished recipe starts no server"


def test_a_key_is_in_one_private_file_and_a_command_ends_the_server(bench: Bench) -> None:
    """On a shared node, loopback protects nothing."""
    bench.run(bench.plan(idle_timeout_s=600.0))
    where = f"workspace={bench.workspace.root}"
    (listed,) = refiner("judge", "servers", where, "--json").json["servers"]
    assert (listed["state"], listed["model"], listed["leases"]) == ("idle", "m", [])
    folder = bench.workspace.layout.service(listed["id"])
    key = (folder / "key").read_text().strip()
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    assert (_status_of(listed["url"], ""), _status_of(listed["url"], key)) == (401, 200)
    stopped = refiner("judge", "stop", where)
    assert (stopped.code, stopped.stdout) == (0, f"Ended: {listed['id']}.\n")
    bench.wait_ended()
    files = [p for p in bench.folder.rglob("*") if p.is_file() and p != folder / "key"]
    assert [p for p in files if key.encode() in p.read_bytes()] == []
    assert "the key is ***" in Path(listed["log"]).read_text(), "its own output is masked, too"


def _status_of(url: str, key: str) -> int:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
    return connection.getresponse().status


def test_two_runs_share_one_server_and_a_stop_of_one_leaves_it_running(bench: Bench) -> None:
    """Arms of an ablation differ in their rewards, and ask one judge."""
    bench.hold()
    other = orchestrator(bench, seed=2)
    campaign = bench.campaign(bench.plan(seed=1))
    campaign.start()
    leases = bench.workspace.root / "services"
    wait_until(lambda: len([*leases.glob("*/leases/grpo-*.json")]) == 2, "two leases")
    campaign.request_stop("Ctrl-C")
    assert campaign.join()["grpo"].state == "interrupted"
    assert bench.alive() == bench.pids, "the other run still needs it"
    bench.let_go()
    assert other.wait(400) == 0
    bench.wait_ended()
    assert len(bench.pids) == 1


def orchestrator(bench: Bench, seed: int) -> subprocess.Popen[bytes]:
    """A process that runs the plan."""
    bench.plan()  # the data are there
    script = [sys.executable, service_bench.__file__, str(bench.folder), str(seed)]
    return subprocess.Popen(script, env=environment(), start_new_session=True)


def test_a_dead_server_or_worker_is_replaced_while_its_users_wait(bench: Bench) -> None:
    bench.behave(questions=12)
    bench.hold()
    plan = bench.plan("--die-after", "8")  # with a question in its hands
    campaign = bench.campaign(plan)
    campaign.start()
    grpo = Stage(bench.workspace.root, "grpo")
    wait_until(lambda: grpo.phase == "holding", "all answers")
    assert len(bench.pids) == 2
    worker = Stage(bench.workspace.root, "serve").worker
    assert worker is not None
    psutil.Process(worker.pid).kill()
    wait_until(lambda: len(bench.pids) == 3, "another server")
    wait_until(lambda: bench.alive() == bench.pids[2:], "the end of the killed worker's server")
    bench.let_go()
    views = campaign.join()
    assert states(views) == {"data": "skipped", "judge": "done", "grpo": "done"}
    assert (views["judge"].attempt, views["grpo"].attempt) == (3, 1)
    assert None not in grpo.result()["report"]["scores"]
    bench.wait_ended()


def test_the_next_orchestrator_finds_the_server_and_a_cancel_ends_it(bench: Bench) -> None:
    bench.hold()
    first = orchestrator(bench, seed=1)
    grpo = Stage(bench.workspace.root, "grpo")
    wait_until(lambda: grpo.phase == "holding", "all answers")
    first.send_signal(signal.SIGKILL)
    first.wait(30)
    campaign = bench.campaign(bench.plan(idle_timeout_s=600.0))
    campaign.start()
    wait_until(lambda: campaign.views()["grpo"].state == "reattached", "the job that asks")
    assert campaign.views()["judge"].state == "reattached"
    bench.workspace.request_cancel(campaign.source.shown[0].run.run, "somebody", ())
    assert campaign.join()["grpo"].state == "interrupted"
    assert bench.wait_ended().leases == ()
    assert len(bench.pids) == 1


def test_a_server_beside_the_trainer_ends_with_its_job(bench: Bench) -> None:
    plan = bench.plan(where="beside")
    assert [s.name for s in plan.stages] == ["data", "grpo"]
    views = bench.run(plan)
    assert states(views) == {"data": "skipped", "grpo": "done"}
    assert len(bench.lines("asked")) == 4  # twice to check it
    assert bench.alive() == []
    assert "[judge] the key is ***" in Path(views["grpo"].log).read_text()


def test_a_server_whose_judge_reasons_ends_before_a_trainer_starts(bench: Bench) -> None:
    views = bench.run(bench.plan("--mode", "reasons"))
    assert views["judge"].state == "failed"
    assert "enable_thinking" in views["judge"].message
    assert Stage(bench.workspace.root, "grpo").attempts == []


@pytest.mark.slurm
def test_on_a_cluster_a_server_is_a_job_that_asks_for_its_key(bench: Bench, slurm: Cluster) -> None:
    plan = bench.plan()
    dispatch = replace(plan.config.dispatch, executor="slurm")
    small = Resources(cpus=1, memory_gb=1, time_limit_min=10)
    judge = replace(plan.config.judge, resources=small)
    plan = make_plan(replace(plan.config, dispatch=dispatch, judge=judge), SOURCES)
    worker = WorkerCommand(bench.workspace.root, (str(WORKER),))
    profile = Profile(name="test", cpu_stages="slurm")
    dispatcher = SlurmDispatcher(bench.workspace, profile, scheduler_poll_s=0.2, worker=worker)
    local = LocalDispatcher(bench.workspace, worker)
    router = Router(
        {"slurm": dispatcher, "local": local},
        lambda stage: "slurm" if stage.kind == "serve" else "local",
    )
    bench.hold()
    campaign = bench.campaign(plan, router)
    campaign.start()
    bench.wait_for_questions(4)
    service = bench.service()
    assert service.job_id == campaign.views()["judge"].job_id
    assert not service.url.startswith("http://127."), "other nodes have to reach it"
    assert _status_of(service.url, "") == 401
    bench.let_go()
    assert states(campaign.join()) == {"data": "skipped", "judge": "done", "grpo": "done"}
    bench.wait_ended()
