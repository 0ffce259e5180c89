"""`refiner certify` as a user calls it, on a CPU: gloo, small shapes, every part; a wrong rank."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flows.certify.processes import rank_checks
from flows.certify.work import Order
from tests.support.command import Finished, command, environment, refiner, wait_until

#: What is tried on every machine; on a CPU the rest is absent.
TRIED = (
    *("kernel eager, float32", "kernel sdpa, float32", "bfloat16 against float32, padded rows"),
    *("sampling against one forward pass, float32", "plain torch on 2 ranks", "ZeRO-3 on 2 ranks"),
    *("all_reduce on 2 ranks", "SFT throughput", "GRPO update"),
    "sampling by transformers",
    "kill -9 and resume",
)


#: The whole command in a fixture, beside another test on the second core.
pytestmark = pytest.mark.timeout(580)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    workspace = tmp_path_factory.mktemp("certify") / "runs"
    return refiner("certify", f"workspace={workspace}", "--json", timeout_s=560), workspace


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_a_cpu_is_certified_by_every_part(certified: tuple[Finished, Path]) -> None:
    done, _ = certified
    checks: Mapping[str, Any] = {c["name"]: c for c in done.json["checks"]}
    assert done.code == 0, [c for c in checks.values() if c["verdict"] == "fail"] or done.stderr
    assert {name: checks[name]["verdict"] for name in TRIED} == dict.fromkeys(TRIED, "pass")
    assert {c["verdict"] for n, c in checks.items() if n.startswith("vLLM")} == {"absent"}
    assert checks["SFT throughput"]["figures"]["tokens_per_s"] > 0
    assert checks["GRPO update"]["figures"]["mfu"] > 0


@pytest.mark.slow
def test_the_certificate_stays_and_the_scratch_does_not(
    certified: tuple[Finished, Path],
) -> None:
    _, workspace = certified
    found = refiner("doctor", f"workspace={workspace}", "--only", "gpu", "--offline", "--json")
    [one] = [f for f in found.json["findings"] if f["name"] == "certificate"]
    assert one["state"] == "ok", one
    assert list((workspace / "proofs" / "scratch").iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_ends_it_with_all_it_has_started(tmp_path: Path) -> None:
    workspace = tmp_path / "runs"
    process = subprocess.Popen(
        command("certify", f"workspace={workspace}", "--only", "faults"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: bool(_workers(workspace)), "a worker", 120)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 6, process.communicate()[0]
    wait_until(lambda: not _workers(workspace), "their end", 20)
    assert list((workspace / "proofs" / "scratch").iterdir()) == []


def _workers(workspace: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "flows.worker" in words and any(str(workspace) in word for word in words):
                found.append(process.pid)
    return found


@pytest.mark.slow
def test_a_rank_whose_sums_are_wrong_is_found(tmp_path: Path) -> None:
    order = Order(0, "float32", "tiny", False, (2,), zero=(0,))
    wrong = replace(order, rank_module="tests.support.wrong_rank")
    found = list(rank_checks(wrong, tmp_path))
    assert "fail" in {c.verdict for c in found}
    assert any("rank 1" in c.why for c in found), found


def test_a_part_that_there_is_not_is_refused(tmp_path: Path) -> None:
    done = refiner("certify", f"workspace={tmp_path}/runs", "--only", "kernels")
    assert done.code == 2
    assert "numerics, ranks, speed, servers, faults" in done.stderr
