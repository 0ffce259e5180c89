"""Servers of judges: the command line, keys, leases, and the life of a server process."""

import importlib.util
import io
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from infra.host.processes import free_port, holder_of, node_address
from infra.jobs.failures import classify
from infra.process.child import MARK
from infra.ranks.messages import visible
from infra.services.judges import (
    JudgeServerProcess,
    ServerRefusal,
    check_chat,
    known_key,
    service_key,
)
from infra.services.process import ListenAddress, error_line, server_environment, server_text
from infra.store import orchestrators as leases_module
from infra.store.orchestrators import (
    LOST_AFTER_S,
    RENEW_S,
    CallLeases,
    Lease,
    LeaseWatch,
    attempt_holder,
    held_by_others,
    holders,
)
from infra.store.workspace import Workspace
from refiner_core.contract.config import JudgeConfig, RecipeConfig, ServeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, RefinerError
from refiner_core.contract.plan import make_plan
from refiner_core.contract.plan_builder import judge_service
from refiner_core.contract.records import AttemptOutcome
from refiner_core.contract.types import Endpoint, JudgeRequest
from refiner_core.judges.context import JudgeContext
from refiner_core.judges.openai import OpenAIJudge
from refiner_core.models import tiny_model_dir
from tests.support.command import wait_until
from tests.support.judge_server import JudgeServer, score
from tests.support.plans import SOURCES, claim, small_config, small_plan
from tests.support.port_thief import thief
from tests.support.require import require
from tests.support.users import needs_users

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "support" / "served_judge.py"
AT = ListenAddress("127.0.0.1", 8123)
JUDGE = JudgeConfig(kind="openai", model="org/judge", revision="r1")


def serve(judge: JudgeConfig = JUDGE, **fields: Any) -> JudgeConfig:
    return replace(judge, serve=replace(judge.serve, **fields))


# ---------------------------------------------------------------- what is started


def test_the_command_line_of_vllm() -> None:
    text = server_text(serve(engine="vllm", args=("--tensor-parallel-size 2", "--x=a b")), AT)
    assert text.splitlines()[0] == "set -e"
    assert shlex.split(text.splitlines()[1]) == [
        *shlex.split("exec vllm serve org/judge --revision r1 --host 127.0.0.1 --port 8123"),
        *("--served-model-name", "org/judge", "--generation-config", "vllm"),
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        *("--tensor-parallel-size", "2", "--x=a", "b"),
    ]
    own = "--structured-outputs-config.backend=outlines"
    lines = server_text(
        serve(
            engine="vllm",
            python="/opt/vllm/bin/python",
            setup=("module load cuda",),
            container="apptainer exec --nv vllm.sif",
            args=(own,),
        ),
        AT,
    ).splitlines()
    assert lines[1] == "module load cuda"
    assert lines[2].startswith(
        "exec apptainer exec --nv vllm.sif /opt/vllm/bin/python -m vllm.entrypoints.cli.main serve"
    )
    assert own in lines[2]
    assert "xgrammar" not in lines[2], "a setting of the user replaces ours"


def test_the_command_line_of_transformers_and_of_a_custom_server() -> None:
    plain = replace(serve(engine="transformers", python="/py"), model="org/judge@r1", revision=None)
    assert server_text(plain, AT).endswith(
        "/py -P -m transformers.cli.transformers serve org/judge@r1 --host 127.0.0.1 --port 8123"
    )
    with pytest.raises(ConfigurationError, match=r"judge\.model=org/judge@r1"):
        server_text(serve(engine="transformers"), AT)
    own = replace(JUDGE, model="a b; rm x", serve_command="srv {model} {revision}\n {host}:{port}")
    assert server_text(own, AT).endswith("exec srv 'a b; rm x' r1 127.0.0.1:8123")


def test_a_key_is_in_the_environment_of_its_engine_alone() -> None:
    given = {"VLLM_API_KEY": "old", "VLLM_SERVER_DEV_MODE": "1", "PATH": "/bin", "HF_HOME": "/hf"}
    found = server_environment("vllm", "secret", "/mark", given)
    assert found["VLLM_API_KEY"] == "secret"
    assert "VLLM_SERVER_DEV_MODE" not in found, "it opens routes that change weights"
    assert (found["HF_HOME"], found[MARK]) == ("/hf", "/mark")
    assert "secret" not in server_text(serve(engine="vllm"), AT)
    other = server_environment("command", "secret", "/mark", given)
    assert other["REFINER_SERVER_KEY"] == "secret"
    assert "VLLM_API_KEY" not in other


def test_a_judge_beside_a_stage_sees_its_own_gpus_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rank 0, which starts it, only the trainer's are visible."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("REFINER_JOB_GPUS", "4,5,6,7")
    own_gpus = JudgeServerProcess(serve(engine="vllm"), tmp_path, gpus=visible((2, 3)))
    shared = JudgeServerProcess(serve(engine="vllm"), tmp_path)
    seen = [server.command()[1]["CUDA_VISIBLE_DEVICES"] for server in (own_gpus, shared)]
    assert seen == ["6,7", "4,5"]


# ---------------------------------------------------------------- which server it is


def recipe(**serve_fields: Any) -> RecipeConfig:
    judge = serve(replace(JUDGE, api_key_env="ELSEWHERE"), engine="vllm", **serve_fields)
    return replace(small_config("data", "grpo", "evaluate"), judge=judge)


def test_arms_share_a_server_unless_its_settings_differ() -> None:
    config = recipe()
    mine = judge_service(config)
    arm = replace(config, seed=9, reward=replace(config.reward, paper_citation_weight=0.5))
    waits = replace(config, judge=serve(config.judge, idle_timeout_s=5.0, start_timeout_s=9.0))
    for same in (arm, waits, replace(config, judge=replace(config.judge, prompt="v1"))):
        found = judge_service(same)
        assert found.id == mine.id
    others = [
        replace(config, judge=replace(config.judge, model="org/other")),
        replace(config, judge=replace(config.judge, revision="r2")),
        replace(config, judge=serve(config.judge, args=("--max-model-len 9",))),
        replace(config, judge=serve(config.judge, python="/other/python")),
        replace(config, dispatch=replace(config.dispatch, executor="slurm")),
    ]
    ids = {service.id for c in others if (service := judge_service(c)) is not None}
    assert len(ids) == len(others)
    assert mine.id not in ids


def test_how_a_judge_is_served_changes_no_stage_that_asks_it() -> None:
    served, named = recipe(), recipe()
    named = replace(named, judge=replace(named.judge, base_url="http://127.0.0.1:1/v1"))
    beside = recipe(where="beside")
    plans = [make_plan(c, SOURCES) for c in (served, named, beside)]
    ids = [{s.name: s.id for s in plan.stages if s.kind != "serve"} for plan in plans]
    assert ids[0] == ids[1] == ids[2]
    assert [plan.by_name.get("judge") is not None for plan in plans] == [True, False, False]
    only = make_plan(replace(recipe(), only=("grpo",)), SOURCES)
    assert [s.name for s in only.stages] == ["judge", "grpo"]

    weights = {"judge.weights": "hub:org/judge@r1"}
    plan = make_plan(served, SOURCES | weights)
    assert plan.by_name["judge"].after == ("fetch",)
    assert plan.by_name["grpo"].after == ("judge",), "the trainer itself reads no weights of it"
    plan = make_plan(beside, SOURCES | weights)
    assert plan.by_name["grpo"].after == ("fetch",)
    assert plan.by_name["fetch"].sources == weights


def test_an_engine_without_keys_is_refused_where_all_of_a_cluster_would_reach_it() -> None:
    config = replace(recipe(), judge=serve(engine="transformers"))
    assert judge_service(config) is not None, "loopback"
    cluster = replace(config, dispatch=replace(config.dispatch, executor="slurm"))
    with pytest.raises(ConfigurationError, match=r"where=beside"):
        make_plan(cluster, SOURCES)


# ---------------------------------------------------------------- keys


def test_keys_are_private_to_their_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"REFINER_SERVER_KEY": " shared-key\n"}
    assert service_key(tmp_path, given) == ("shared-key", "environment")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv("REFINER_SERVER_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="export REFINER_SERVER_KEY="):
        known_key(tmp_path, "environment")
    monkeypatch.setenv("REFINER_SERVER_KEY", "shared-key")
    assert known_key(tmp_path, "environment") == "shared-key"
    key, source = service_key(tmp_path, {})
    assert (len(key) > 30, source) == (True, "file")
    assert service_key(tmp_path, {}) == (key, "file")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert known_key(tmp_path, "file") == key


def test_a_judge_key_goes_to_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be worth money, and any owner of a local port would get it."""
    variable = JudgeConfig().api_key_env
    monkeypatch.setenv(variable, "sk-worth-money")
    key, source = service_key(tmp_path, os.environ)
    assert (key != "sk-worth-money", source) == (True, "file")
    with JudgeServer(lambda body, call: score(2)) as server:
        around = JudgeContext(endpoints=lambda: [Endpoint(server.base_url)])
        with OpenAIJudge(JUDGE, around) as judge:
            judge.judge([JudgeRequest("citation_needed", "Q?", "Text.")])
        assert server.headers
        assert [h for h in server.headers if "Authorization" in h] == []


# ---------------------------------------------------------------- leases


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 10.0 * LOST_AFTER_S  # a host has been up for a while

    def __call__(self) -> float:
        return self.now


def test_a_server_is_needed_while_a_holder_moves_its_counter(workspace: Workspace) -> None:
    clock, plan = Clock(), small_plan("data", "sft")
    stage = claim(workspace, plan, "data")
    watch = LeaseWatch(workspace, "serve-1", clock)
    lease = Lease(workspace.layout.service("serve-1"), attempt_holder(stage.id, 1), clock)
    for _ in range(100):  # far longer than a lease that stands still is good for
        clock.now += RENEW_S
        lease.renew()
        assert watch.observe() == [f"{stage.id}-0001"]
        assert watch.idle_s == 0
    clock.now += LOST_AFTER_S + 1
    assert watch.observe() == [], "its holder was killed together with all who could have said so"
    clock.now += 7
    assert watch.idle_s > 7


def test_a_returned_lease_stays_away(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an unused server would be kept until the lease counts as lost."""
    monkeypatch.setattr(leases_module, "RENEW_S", 0.01)
    service = workspace.layout.service("serve-1")
    path = service / "leases" / f"{attempt_holder('sft-1', 1)}.json"
    renewing, given_back = threading.Event(), threading.Event()

    def clock() -> float:
        if threading.current_thread() is not threading.main_thread():
            renewing.set()
            given_back.wait(0.2)  # time enough to overtake it, if nothing waits for it
        return time.monotonic()

    with Lease(service, attempt_holder("sft-1", 1), clock):
        (thread,) = (t for t in threading.enumerate() if t.name == "lease")
        assert renewing.wait(30)
    given_back.set()
    thread.join(30)
    assert not path.exists()


@pytest.mark.parametrize("text", ["", '{"coun', "[1]", '{"counter": "one"}'])
def test_a_damaged_lease_counts_until_it_is_lost(workspace: Workspace, text: str) -> None:
    """A power cut leaves an empty file, and its holder does not come back to renew it."""
    clock = Clock()
    folder = workspace.layout.service("serve-1") / "leases"
    folder.mkdir(parents=True)
    (folder / "hand-node7-4711.json").write_text(text)
    watch = LeaseWatch(workspace, "serve-1", clock)
    assert watch.observe() == ["hand-node7-4711"]
    Lease(workspace.layout.service("serve-1"), "hand-node7-4711", clock).renew()
    clock.now += LOST_AFTER_S
    assert watch.observe() == ["hand-node7-4711"], "it is renewed after all"
    (folder / "hand-node7-4711.json").write_text(text)
    assert watch.observe() == ["hand-node7-4711"]
    clock.now += 180.0
    assert watch.observe() == ["hand-node7-4711"], "not one moment before"
    clock.now += 0.5
    assert watch.observe() == []
    assert list(folder.iterdir()) == []


def test_only_leases_of_open_attempts_and_live_calls_count(workspace: Workspace) -> None:
    stage = claim(workspace, small_plan("data", "sft"), "data")
    service, holder = workspace.layout.service("serve-1"), f"{stage.id}-0001"
    Lease(service, attempt_holder(stage.id, 1)).renew()
    (service / "leases" / ".tmp-grpo-1-0001.json").write_text("")  # being written
    leases = CallLeases(workspace, "20260101-000000-gone")
    leases.keep(["serve-1"])
    assert holders(workspace, "serve-1") == [holder]
    assert LeaseWatch(workspace, "serve-1").observe() == [holder]
    assert held_by_others(workspace, "serve-1", {stage.id, "my-run"}) == ""
    assert held_by_others(workspace, "serve-1", {"my-run"}) == holder
    leases.keep([])
    workspace.close_attempt(stage.id, 1, AttemptOutcome("killed", "resume"))
    assert holders(workspace, "serve-1") == []
    assert LeaseWatch(workspace, "serve-1").observe() == []
    assert [*service.glob("leases/[!.]*.json")] == []


# ---------------------------------------------------------------- a server that runs


def own(mode: str = "ok", **fields: Any) -> JudgeConfig:
    call = shlex.join([sys.executable, "-I", "-S", str(SCRIPT), "--mode", mode])
    command = f"{call} --host {{host}} --port {{port}} --model {{model}}"
    fields = {"start_timeout_s": 20.0, **fields}
    return JudgeConfig("openai", "m", serve_command=command, serve=ServeConfig(**fields))


def server_of(tmp_path: Path, judge: JudgeConfig, **more: Any) -> JudgeServerProcess:
    return JudgeServerProcess(
        judge, tmp_path, key="the-key-of-this-test", log="/there/log.txt", **more
    )


def group_of(server: JudgeServerProcess) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


@pytest.mark.parametrize(
    ("judge", "says", "failure", "exit_code"),
    [
        (own("traceback"), "RuntimeError: the weights are not what they should be", "bug", 1),
        (own("memory"), "CUDA out of memory", "gpu_out_of_memory", 1),
        (own("sick", start_timeout_s=3.0), 'HTTP 500 for a chat request: {"error": "the', "bug", 1),
        (own(args=("--lenght 5",)), "unrecognized arguments: --lenght 5", "bad_configuration", 2),
        (own(setup=("echo no such module >&2", "false")), "no such module", "bug", 1),
        (own(container="no-such-tool exec"), "no-such-tool: not found", "bad_configuration", 2),
        (own(python="/no/such/python", engine="vllm"), "/no/such/python", "bad_configuration", 2),
        (replace(own(), model="served under another name"), "", "", 0),
    ],
)
def test_one_that_does_not_come_up_is_quoted_with_the_line_that_says_why(
    tmp_path: Path, judge: JudgeConfig, says: str, failure: str, exit_code: int
) -> None:
    if not failure:
        with server_of(tmp_path, judge) as server:
            assert server.endpoint.key == "the-key-of-this-test"
        return
    with pytest.raises(RefinerError) as caught, server_of(tmp_path, judge):
        pass
    assert says in str(caught.value)
    assert "/there/log.txt" in str(caught.value)
    assert "the-key-of-this-test" not in str(caught.value)
    outcome = classify(caught.value)
    assert (outcome.failure, outcome.exit_code) == (failure, exit_code)


def test_a_server_for_a_cluster_that_asks_for_no_key_is_not_used(tmp_path: Path) -> None:
    address = node_address()
    if address.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    with (
        pytest.raises(ConfigurationError, match="answers without a key"),
        server_of(tmp_path, own("open"), host=address),
    ):
        pass
    with server_of(tmp_path, own("open")):
        pass  # on loopback that is its own business


def test_a_port_that_another_user_was_faster_to_take_gets_no_key_and_gives_no_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needs_users()
    judge = own(args=("--startup 0.5",))
    with thief() as other:
        ports = iter([other.port])
        monkeypatch.setattr(
            "infra.services.process.free_port", lambda host: next(ports, 0) or free_port(host)
        )
        with server_of(tmp_path, judge) as server:
            assert urlsplit(server.endpoint.url).port != other.port
            check_chat(server.endpoint, "m")
    assert other.keys == []
    assert f"Port {other.port} " in caplog.text, "the log has the reason"


def test_a_port_is_ours_if_what_we_started_listens_there(tmp_path: Path) -> None:
    with socket.socket() as free, server_of(tmp_path, own()) as server:
        free.bind(("127.0.0.1", 0))
        port, top = urlsplit(server.endpoint.url).port, server.process
        assert port is not None
        assert holder_of(free.getsockname()[1], top.pid) == "nobody"
        assert holder_of(port, top.pid) == "ours"
        child = subprocess.Popen(["sleep", "60"])
        try:
            assert holder_of(port, child.pid) == "another"
            assert holder_of(port, child.pid, by_daemon=True) == "ours", "this user's own"
        finally:
            child.kill()
            child.wait()


def test_a_full_disk_ends_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output is read all the same: else its pipe closes, and it dies at its next line."""
    lines = tmp_path / "lines"
    text = f"for i in 1 2 3; do echo $i >> {lines}; echo line $i; sleep 0.1; done; sleep 60"
    process = server_of(tmp_path, own())
    with io.FileIO("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        process.launch(text, os.environ)
        try:
            wait_until(lambda: process.last_word() == "line 3" or process.code is not None, "lines")
            assert process.code is None
            assert lines.read_text().split() == ["1", "2", "3"]
        finally:
            process.stop(0.0)
            monkeypatch.undo()


def test_processes_that_a_server_left_or_that_ignore_the_end_are_killed(tmp_path: Path) -> None:
    """Engines detach processes from those that started them; with these goes the GPU's memory."""
    environment = server_environment("command", "", str(tmp_path), os.environ)
    orphan = subprocess.Popen(["sleep", "100"], env=environment, start_new_session=True)
    wait_until(lambda: MARK in psutil.Process(orphan.pid).environ(), "its environment")
    with server_of(tmp_path, own("stubborn")) as server:
        assert orphan.wait(60) == -signal.SIGKILL
        running = group_of(server)
        assert running
        server.stop(0.3)
        assert not any(p.is_running() and p.status() != "zombie" for p in running)


def test_a_stop_is_heard_while_weights_are_loaded(tmp_path: Path) -> None:
    slow = replace(own(), serve_command="sleep 60")
    asked = threading.Event()
    threading.Timer(0.3, asked.set).start()
    with pytest.raises(Interrupted), server_of(tmp_path, slow, should_stop=asked.is_set):
        pass


def test_the_death_of_a_running_server_is_reported(tmp_path: Path) -> None:
    with server_of(tmp_path, own()) as server:
        server.check_alive()
        with pytest.raises(ServerRefusal, match="does not exist"):
            check_chat(server.endpoint, "another model")
        for process in group_of(server):
            process.kill()
        wait_until(lambda: server.process is None, "its end")
        with pytest.raises(RefinerError, match=r"while it served \(signal 9\)") as caught:
            server.check_alive()
    assert classify(caught.value).failure == "killed"


def test_the_line_that_names_the_error_is_found_among_many() -> None:
    cause = "(EngineCore pid=7) ValueError: Free memory on device (1 GiB) is too small"
    traceback = "(EngineCore pid=7) ERROR 01-01 Traceback (most recent call last):"
    last = "RuntimeError: Engine core initialization failed. See root cause above."
    assert error_line([traceback, cause, last, "bye"]) == cause
    assert error_line(["OSError: [Errno 98] in use", "INFO: done"]) == "OSError: [Errno 98] in use"
    assert error_line(["loading", "ready soon"]) == "ready soon"


# ---------------------------------------------------------------- real engines


def test_transformers_serves_the_shipped_model(tmp_path: Path) -> None:
    missing = [m for m in ("openai", "uvicorn", "fastapi") if importlib.util.find_spec(m) is None]
    require("serving", not missing, f"`transformers serve` needs {', '.join(missing)}")
    model = str(tiny_model_dir())
    judge = JudgeConfig(
        "openai", model, serve=ServeConfig(engine="transformers", python=sys.executable)
    )
    judge = serve(judge, args=("--device cpu",), setup=("export OMP_NUM_THREADS=1",))
    with JudgeServerProcess(judge, tmp_path) as server:
        check_chat(server.endpoint, model)
        server.check_alive()


def test_vllm_serves_the_shipped_model_with_a_key(tmp_path: Path) -> None:
    python = os.environ.get("REFINER_VLLM_PYTHON")
    require("vllm", python, "REFINER_VLLM_PYTHON names no interpreter that has vLLM")
    judge = JudgeConfig("openai", "builtin:tiny", serve=ServeConfig(engine="vllm", python=python))
    judge = serve(judge, args=("--dtype float32", "--max-model-len 8192", "--enforce-eager"))
    with server_of(tmp_path, judge, weights=str(tiny_model_dir())) as server:
        check_chat(server.endpoint, "builtin:tiny")
        with pytest.raises(ServerRefusal, match="401"):
            check_chat(Endpoint(server.endpoint.url), "builtin:tiny")
        # No judge, but it can be held to the form of a judgement.
        around = JudgeContext(endpoints=lambda: [server.endpoint])
        with OpenAIJudge(replace(judge, max_tokens=32), around) as asked:
            requests = [JudgeRequest("citation_needed", "Q?", f"Text {n}.") for n in range(4)]
            assert [j.detail for j in asked.judge(requests)] == [""] * 4
        running = group_of(server)
    assert not any(p.is_running() and p.status() != "zombie" for p in running)
