"""`refiner certify` on a CPU: gloo, small shapes, every part; a wrong rank."""

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
from flows.certify.work import WorkOrder
from flows.cli.main import main
from tests.support.command import command, environment, refiner, wait_until

#: What is tried on every machine; on a CPU the rest is absent.
TRIED = (
    *("kernel eager, float32", "kernel sdpa, float32", "bfloat16 against float32, padded rows"),
    *("sampling against one forward pass, float32", "plain torch on 2 ranks", "ZeRO-3 on 2 ranks"),
    *("all_reduce on 2 ranks", "SFT throughput", "GRPO update"),
    "sampling by transformers",
    "kill -9 and resume",
)


#: The whole command takes minutes.
pytestmark = pytest.mark.timeout(580)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_a_cpu_is_certified_by_every_part(tmp_path: Path) -> None:
    workspace = tmp_path / "runs"
    done = refiner("certify", f"workspace={workspace}", "--json", timeout_s=560)
    checks: Mapping[str, Any] = {c["name"]: c for c in done.json["checks"]}
    assert done.code == 0, [c for c in checks.values() if c["verdict"] == "fail"] or done.stderr
    assert {name: checks[name]["verdict"] for name in TRIED} == dict.fromkeys(TRIED, "pass")
    assert {c["verdict"] for n, c in checks.items() if n.startswith("vLLM")} == {"absent"}
    assert checks["SFT throughput"]["figures"]["tokens_per_s"] > 0
    assert checks["GRPO update"]["figures"]["mfu"] > 0
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
    wait_until(lambda: bool(_workers(workspace)), "a worker")
    process.send_signal(signal.SIGINT)
    assert process.wait(400) == 6, process.communicate()[0]
    wait_until(lambda: not _workers(workspace), "their end")
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
    order = WorkOrder(0, "float32", "tiny", False, (2,), zero=(0,))
    wrong = replace(order, rank_module="tests.support.wrong_rank")
    found = list(rank_checks(wrong, tmp_path))
    assert "fail" in {c.verdict for c in found}
    assert any("rank 1" in c.why for c in found), found


def test_an_unknown_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", f"workspace={tmp_path}/runs", "--only", "kernels"]) == 2
    assert "numerics, ranks, speed, servers, faults" in capsys.readouterr().err
