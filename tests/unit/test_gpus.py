"""GPUs of this machine: no two jobs have the same one, and none is lost."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infra.host.gpus import Gpu, GpuPool, gpus_here, leases
from refiner_core.contract.errors import SystemOutage
from tests.support.gpus import fake_driver, invented

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
    room = pool.room()
    assert (room.total, room.free) == (2, 0)
    assert "used by grpo-1 of " in room.users
    assert not pool.share({"sft-1": 1})
    process.send_signal(signal.SIGKILL)
    end(process)
    assert pool.room().free == 2
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
    assert GpuPool().room().free == 0
    end(job)
    assert GpuPool().room().free == 2


def test_all_or_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that each held a half of what they need would wait for each other."""
    invented(monkeypatch, 3)
    pool = GpuPool()
    assert not pool.share({"serve-1": 2, "grpo-1": 2})
    assert pool.names("serve-1") == ()
    assert pool.share({"serve-1": 1, "grpo-1": 2})
    assert pool.room().free == 3  # its own to give
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
        assert GpuPool().room().free == 1
        pool = GpuPool()
        assert pool.share({"grpo-1": 1})
        assert "\x1b" not in "".join(leases().values())
        pool.release("grpo-1")
