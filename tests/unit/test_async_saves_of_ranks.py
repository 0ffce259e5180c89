"""Two ranks save together beside training: one checkpoint of both, one answer to what goes wrong.

The processes, gloo, the store and the boundary are real; the state is a number.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from refiner_core.training.ranks import TALK
from tests.support.command import ROOT

FAULTS = ("slow", "full", "error")
STATE_OF_STEP_4 = '{"stage": "sft", "step": 4}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Any]:
    """What rank 0 has to say in the end of each training."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.two_savers", folder, *FAULTS],
            cwd=ROOT,
            env={
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", TALK: "5a" * 32},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [process.communicate(timeout=80) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [p.returncode for p in started] == [0, 0], answers[0][1] + answers[1][1]
    lines = [json.loads(line) for line in answers[0][0].splitlines() if line.startswith("{")]
    return dict(zip(FAULTS, lines, strict=True))


@pytest.mark.parametrize("fault", ["slow", "full"])
def test_both_ranks_save_one_moment(told: dict[str, Any], fault: str) -> None:
    found = told[fault]
    assert (found["steps"], found["error"]) == ([4, 8, 9], "")
    assert found["kept"] == {"state-0": STATE_OF_STEP_4, "state-1": STATE_OF_STEP_4}
    assert found["waited"] == (1 if fault == "full" else 0)
    saved = dict(found["seen"])
    assert saved[4] == 0, "training goes on before it is complete"
    assert saved[9] == 9


def test_an_error_of_one_rank_is_one_of_both(told: dict[str, Any], folder: Path) -> None:
    assert "the second rank cannot write" in told["error"]["error"]
    assert told["error"]["steps"] == []
    assert list((folder / "error" / "data" / "checkpoints").iterdir()) == []
