"""GPUs of this machine and of a plan: no two jobs have the same one, and none is lost."""

import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flows.checking.resources import gpu_lines, gpu_use, gpus_json
from flows.running.calls import make_recipe_plan
from infra.host.gpus import Gpu, GpuPool, gpus_here, leases
from infra.jobs.dispatch import LocalDispatcher
from infra.jobs.dispatcher import JobRequest, JobStatus, OpenAttempt, WorkerCommand
from infra.store.workspace import Workspace
from refiner_core.contract.config import Resources
from refiner_core.contract.errors import LaunchError, SystemOutage
from refiner_core.contract.plan import Plan
from tests.support.gpus import fake_driver, invented
from tests.support.plans import claim, small_plan

#: Takes two GPUs for `grpo-1`, tells which, and keeps them until it is killed or told to end.
HOLDER = """
import sys
from infra.host.gpus import GpuPool
pool = GpuPool()
print(pool.share({"grpo-1": 2}), *pool.names("grpo-1"), flush=True)
sys.stdin.read()
"""


def holder() -> subprocess.Popen[str]:
    """A process that takes two GPUs, if it can."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def said(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.communicate("")


def test_processes_that_race_get_disjoint_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    names = invented(monkeypatch, 5)
    holders = [holder() for _ in range(3)]
    lines = [said(process) for process in holders]
    end(*holders)
    got = [name for _, *words in lines for name in words]
    assert sorted(has for has, *_ in lines) == ["False", "True", "True"]
    assert sorted(got) == sorted(set(got))
    assert set(got) <= set(names)


def test_a_killed_process_leaves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    invented(monkeypatch, 2)
    pool = GpuPool()
    process = holder()
    assert said(process)[0] == "True"
    room = pool.available()
    assert (room.total, room.free) == (2, 0)
    assert "used by grpo-1 of " in room.users
    assert not pool.share({"sft-1": 1})
    process.send_signal(signal.SIGKILL)
    end(process)
    assert pool.available().free == 2
    assert pool.share({"sft-1": 1})
    pool.release("sft-1")


def test_a_job_keeps_its_gpus_when_its_orchestrator_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    invented(monkeypatch, 2)
    pool = GpuPool()
    assert pool.share({"grpo-1": 2})
    job = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        text=True,
        pass_fds=pool.descriptors("grpo-1"),
    )
    pool.release("grpo-1")
    assert GpuPool().available().free == 0
    end(job)
    assert GpuPool().available().free == 2


def test_all_or_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that each held a half of what they need would wait for each other."""
    invented(monkeypatch, 3)
    pool = GpuPool()
    assert not pool.share({"serve-1": 2, "grpo-1": 2})
    assert pool.names("serve-1") == ()
    assert pool.share({"serve-1": 1, "grpo-1": 2})
    assert pool.available().free == 3  # its own to give
    assert pool.share({"grpo-1": 2})  # and what is no longer wanted is given up
    assert len(set(leases()) & {g.uuid for g in gpus_here()}) == 2
    pool.release("grpo-1")


A, B, PART, OTHER = "GPU-aaaa-1", "GPU-bbbb-2", "MIG-cccc-3", "MIG-dddd-4"
LISTED = f"""GPU 0: NVIDIA H100 80GB HBM3 (UUID: {A})
GPU 1: NVIDIA H100 80GB HBM3 (UUID: {B})
  MIG 3g.40gb     Device  0: (UUID: {PART})
  MIG 3g.40gb     Device  1: (UUID: {OTHER})
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [Gpu("0", A), Gpu(PART, PART), Gpu(OTHER, OTHER)]),
        ("", []),
        ("NoDevFiles", []),
        ("0,-1,1", [Gpu("0", A)]),
        ("GPU-aa, MIG-dddd-4", [Gpu("GPU-aa", A), Gpu(OTHER, OTHER)]),
        (f"0,{A}", [Gpu("0", A)]),
        ("1", [Gpu("1", PART)]),
    ],
)
def test_names_are_those_of_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: list[Gpu]
) -> None:
    """Two names of one GPU (a number, a UUID, its first part) are one lease."""
    fake_driver(tmp_path, monkeypatch, LISTED)
    assert list(gpus_here({} if given is None else {"CUDA_VISIBLE_DEVICES": given})) == expected


def test_a_driver_that_fails_is_no_machine_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs wait until it answers again; GPUs with whole UUIDs are used meanwhile."""
    fake_driver(tmp_path, monkeypatch, "Failed to initialize NVML", code=9)
    for given in ({}, {"CUDA_VISIBLE_DEVICES": "0"}):
        with pytest.raises(SystemOutage, match="Failed to initialize NVML"):
            gpus_here(given)
    whole = "GPU-12345678-1234-1234-1234-123456789012"
    assert gpus_here({"CUDA_VISIBLE_DEVICES": whole}) == (Gpu(whole, whole),)


def test_a_hostile_label_is_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    invented(monkeypatch, 1)
    (gpu,) = gpus_here()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as label:
        label.bind(f"\0refiner-gpu/{gpu.uuid}=\x1b[2Jnobody".encode())
        assert GpuPool().available().free == 1
        pool = GpuPool()
        assert pool.share({"grpo-1": 1})
        assert "\x1b" not in "".join(leases().values())
        pool.release("grpo-1")


# ---------------------------------------------------------------- the GPUs of a plan


def large(name: str = "refiner-gpt54", *words: str) -> Plan:
    return make_recipe_plan(name, ["workspace=/tmp/none", *words])


def test_the_large_recipe_says_how_many_gpus_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    invented(monkeypatch, 8)
    use = gpu_use(large())
    assert use is not None
    assert [(job.stage, job.gpus) for job in use.jobs] == [("grpo", 8), ("judge", 4)]
    assert (use.at_once, use.most) == (12, 13), "another stage is evaluated meanwhile"
    text = "\n".join(gpu_lines(large()))
    assert "12 at the same time (2 jobs: grpo 8 + judge 4 GPUs)" in text
    assert "| grpo: r0  r1  r2  r3  s0  s1  s2  s3 | judge: j   j   j   j" in text
    assert "Impossible here: grpo needs 12 GPUs of this machine" in text


def test_the_recipe_for_one_node_fits_and_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    invented(monkeypatch, 8)
    plan = large("refiner-one-node")
    use = gpu_use(plan)
    assert use is not None
    assert (use.at_once, use.lacks) == (8, "")
    assert plan.by_name["grpo"].fingerprint == large().by_name["grpo"].fingerprint
    grpo = plan.config.grpo
    rollouts = grpo.num_unique_prompts_rollout * grpo.num_samples_per_prompt_rollout
    assert rollouts % sum(cell.startswith("r") for cell in use.jobs[0].layout[0]) == 0


def test_a_judge_beside_its_trainer_sits_on_the_trainers_node() -> None:
    words = ("judge.serve.where=beside", "grpo.resources.gpus=8", "evaluate.resources.gpus=3")
    found = gpus_json(large("refiner-one-node", *words))
    assert found is not None
    assert found["jobs"][0]["layout"] == [["r0", "r1", "r2", "r3", "s0", "s1", "j", "j"]]
    assert [job["stage"] for job in found["jobs"]] == ["grpo"]


def sinfo(folder: Path, monkeypatch: pytest.MonkeyPatch, *nodes: str) -> None:
    """A cluster whose `sinfo` lists these nodes."""
    program = folder / "sinfo"
    lines = "\n".join(f"gpu*|n{number}|{offered}" for number, offered in enumerate(nodes))
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_partition_of_one_node_can_never_run_trainer_and_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge would hold four GPUs, and the trainer queue for ever."""
    sinfo(tmp_path, monkeypatch, "gpu:h100:8(S:0-1)", "(null)")
    lines = gpu_lines(large("refiner-gpt54", "dispatch.executor=slurm"))
    assert "(2 jobs: grpo 8 + judge 4 GPUs)" in lines[0]
    assert lines[1:3] == [
        "  grpo, node 1  | r0  r1  r2  r3  s0  s1  s2  s3",
        "  judge, node 1 | j   j   j   j",
    ]
    assert "the nodes with GPUs are 1 of 8" in lines[-1]
    assert "never" not in gpu_lines(large("refiner-one-node", "dispatch.executor=slurm"))[-1]
    sinfo(tmp_path, monkeypatch, "gpu:8", "gpu:4")
    assert "never" not in gpu_lines(large("refiner-gpt54", "dispatch.executor=slurm"))[-1]


def test_a_plan_without_gpus_says_nothing_about_them() -> None:
    plan = make_recipe_plan("tiny", ["workspace=/tmp/none"])
    assert gpu_lines(plan) == []
    assert gpus_json(plan) is None


# ---------------------------------------------------------------- jobs of this machine


TELL = """
import os, sys
print("sees " + os.environ["CUDA_VISIBLE_DEVICES"] + ".", flush=True)
sys.exit({code})
"""


def end_of(tmp_path: Path, gpus: int = 0, code: int = 0) -> tuple[str, JobStatus]:
    """What a worker that never takes its attempt prints, and how its job looks when it has ended;
    or with what it was refused."""
    workspace = Workspace.open(tmp_path / "ws")
    stage = claim(workspace, small_plan("data"), "data")
    script = tmp_path / "tell.py"
    script.write_text(TELL.format(code=code))
    local = LocalDispatcher(workspace, WorkerCommand(workspace.root, (str(script),)))
    request = JobRequest(stage.id, 1, "refiner-test", replace(Resources(), gpus=gpus))
    failed = local.submit([request])
    if failed:
        raise failed[request.ref]
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        attempt = workspace.read_attempt(stage.id, 1)
        assert attempt is not None
        seen = local.observe([OpenAttempt(request.ref, replace(attempt, owner="x:1:1.00"))])
        if seen[request.ref].liveness == "dead":
            return workspace.layout.attempt(stage.id, 1).printed.read_text(), seen[request.ref]
        time.sleep(0.02)
    raise AssertionError("it never ended")


@pytest.mark.parametrize(("gpus", "seen"), [(0, ""), (1, "0"), (2, "0,1")])
def test_a_job_sees_the_gpus_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, seen: str
) -> None:
    """Two that train at a time would else share one without knowing, or take all of them."""
    names = invented(monkeypatch, 3)
    expected = ",".join(names[int(number)] for number in seen.split(",") if number)
    assert f"sees {expected}." in end_of(tmp_path, gpus)[0]


def test_a_job_without_free_gpus_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invented(monkeypatch, 1)
    with pytest.raises(LaunchError, match="2 GPUs are needed"):
        end_of(tmp_path, 2)


@pytest.mark.parametrize(("code", "failure"), [(5, "disk_full"), (1, "bug")])
def test_the_exit_code_gives_the_failure_class(tmp_path: Path, code: int, failure: str) -> None:
    assert end_of(tmp_path, code=code)[1].end.failure == failure
