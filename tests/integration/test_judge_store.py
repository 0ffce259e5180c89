"""The store of judgements: processes that share it and are killed, stages, and the command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from flows.stages.judging import judge_by_hand, judge_for
from infra.judgements import store
from infra.judgements.store import WorkspaceStore, summarise
from infra.store.workspace import Workspace
from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.errors import JudgeOutage
from refiner_core.contract.types import JudgeRequest, Progress, StoredJudgement
from tests.support.command import ROOT, environment, wait_until
from tests.support.judge_server import JudgeServer, Reply, digest_of, verdict
from tests.support.judged_life import config_of, live, prepare, work_of

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20
YES = StoredJudgement(1.0, 10, 2)
#: Puts COUNT keys from FIRST on, and prints its progress.
PUTTER = """
import struct, sys
from pathlib import Path
from infra.judgements.store import WorkspaceStore
from refiner_core.contract.types import StoredJudgement
folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with WorkspaceStore(folder, writer="p", limit_bytes=1 << 20) as store:
    for number in range(first, first + count):
        store.put(struct.pack("<QQ", number, number), StoredJudgement(1.0, 10, 2))
        if number % 100 == 99:
            store.flush()
            print(number, flush=True)
"""


def key(number: int) -> bytes:
    return struct.pack("<QQ", number, number)


def putter(folder: Path, first: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PUTTER, str(folder), str(first), str(count)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)


def known(folder: Path, numbers: range) -> int:
    with WorkspaceStore(folder, writer="r", limit_bytes=MIB) as one:
        return sum(found == YES for found in one.get([key(n) for n in numbers]))


# ---------------------------------------------------------------- processes


def test_processes_share_a_store_while_they_write_and_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed while it writes; the other two lose nothing."""
    monkeypatch.setattr(store, "_LOOK_EVERY_S", 0.0)
    folder = tmp_path / "judgements"
    dying, other = putter(folder, 0, 10**9), putter(folder, 10**10, 2000)
    assert dying.stdout is not None
    assert other.stdout is not None
    with dying, other, WorkspaceStore(folder, writer="r", limit_bytes=MIB) as mine:
        for _ in range(3):
            flushed = int(dying.stdout.readline())
            assert mine.get([key(flushed)]) == [YES], "what was flushed is there for others"
        dying.kill()
        flushed = max([flushed, *(int(line) for line in dying.stdout)])
        assert dying.wait() == -signal.SIGKILL
        assert other.wait(400) == 0
        assert all(mine.get([key(n) for n in range(10**10, 10**10 + 2000)]))
    assert known(folder, range(flushed + 1)) == flushed + 1


# ---------------------------------------------------------------- stages


def test_a_stage_that_was_killed_asks_nothing_again(tmp_path: Path) -> None:
    """The server answers some calls and then none, and the process is killed. The next attempt asks
    only what the server had not answered."""
    prepare(tmp_path)
    silent, answered = True, 14

    def script(body: dict[str, Any], call: int) -> Reply:
        return Reply(delay_s=30) if silent and call >= answered else verdict(body)

    folder = tmp_path / "ws" / "judgements"
    with JudgeServer(script) as server:
        with subprocess.Popen(
            [sys.executable, "-m", "tests.support.judged_life"],
            env={**environment(), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as nursery:
            assert nursery.stdin is not None
            assert nursery.stdout is not None
            print(tmp_path, server.base_url, "evaluate", file=nursery.stdin, flush=True)
            dying = int(nursery.stdout.readline())
            try:
                wait_until(lambda: summarise(folder)["judgements"] >= answered, "judgements")
            finally:
                os.kill(dying, signal.SIGKILL)
                assert int(nursery.stdout.readline()) == -signal.SIGKILL
            nursery.stdin.close()
        silent = False
        before = len(server.bodies)
        first = {digest_of(b) for b in server.bodies[:answered]}
        config = config_of(server.base_url)
        live(tmp_path, "evaluate", config)
        second = {digest_of(b) for b in server.bodies[before:]}
        assert second, "some questions had no answer"
        assert not first & second, "a question that was answered was asked again"
        assert len(server.bodies) - before == len(second), "each question once"
        after = len(server.bodies)
        live(tmp_path, "evaluate", config, stage="-again")
        assert len(server.bodies) == after, "the same stage in another attempt costs no call"
    assert summarise(folder)["judgements"] == len(first) + len(second)


def test_a_stage_reports_that_it_waits_for_its_judge(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    work = work_of(tmp_path, "grpo", config_of(f"http://127.0.0.1:{port}/v1", max_retries=1))
    told: list[Progress] = work.io.progressed  # type: ignore[attr-defined]
    with judge_for(work) as (judge, io), contextlib.ExitStack() as stack:
        io.progress(Progress(3, 10, "judge"))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(judge.judge, QUESTIONS)
            wait_until(lambda: told[-1].phase == "waits for the judge", "the pause")
            assert (told[-1].done, told[-1].total) == (3, 10)
            server = JudgeServer(lambda body, call: verdict(body), port=port)
            stack.enter_context(server)
            assert {j.status for j in waiting.result()} == {"scored"}
        assert told[-1] == Progress(3, 10, "judge"), "the pause is over"


def test_an_outage_leaves_no_judgement_behind(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "ws")
    with JudgeServer(lambda body, call: Reply(status=503)) as server:
        config = served(server, outage_patience_s=0.2, max_retries=1, timeout_s=2.0)
        with judge_by_hand(config, workspace) as judge, contextlib.suppress(JudgeOutage):
            found = judge.judge(QUESTIONS)
            assert {j.status for j in found} == {"failed"}
    with (
        JudgeServer(lambda body, call: Reply(body="no JSON")) as server,
        judge_by_hand(served(server, max_retries=0), workspace) as judge,
    ):
        assert {j.status for j in judge.judge(QUESTIONS)} == {"failed"}
    assert summarise(workspace.layout.judgements)["judgements"] == 0
    with JudgeServer(lambda body, call: verdict(body)) as server:
        with judge_by_hand(served(server), workspace) as judge:
            assert {j.status for j in judge.judge(QUESTIONS)} == {"scored"}
        assert len(server.bodies) == len(QUESTIONS)


# ---------------------------------------------------------------- the same question

QUESTIONS = [JudgeRequest("rubric", "Why?", f"Because {n}.", "It says why.") for n in range(6)]


def served(server: JudgeServer, **changes: Any) -> JudgeConfig:
    first = JudgeConfig(kind="openai", model="m", base_url=server.base_url, concurrency=4)
    return replace(first, **changes)


@pytest.fixture
def calls(tmp_path: Path) -> Callable[..., int]:
    """Count the calls of a judge with other settings, once a first one has judged all."""
    workspace = Workspace.open(tmp_path / "ws")

    def count(**changes: Any) -> int:
        with JudgeServer(lambda body, call: verdict(body)) as server:
            with judge_by_hand(served(server, **changes), workspace) as judge:
                assert {j.status for j in judge.judge(QUESTIONS)} == {"scored"}
            return len(server.bodies)

    assert count() == len(QUESTIONS)
    return count


def test_another_judge_is_asked_anew(calls: Callable[..., int]) -> None:
    """Which settings make another judge: ``tests/unit/test_judge_questions.py``."""
    assert calls(model="other") == len(QUESTIONS)
    assert calls(model="other") == 0
    assert calls() == 0


# ---------------------------------------------------------------- the command


def test_the_command_shows_the_store_and_deletes_it_on_request(
    calls: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def disk(*words: str) -> Any:
        assert main(["disk", f"workspace={tmp_path / 'ws'}", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    calls()
    assert disk()["judgements"]["judgements"] == len(QUESTIONS)
    kept = disk("--reclaim")
    assert not [c for c in kept["candidates"] if c["kind"] == "judgements"]
    assert calls() == 0
    gone = disk("--reclaim", "--judgements")
    assert {c["kind"] for c in gone["candidates"]} == {"judgements"}
    assert json.dumps(gone["reclaimed"]).count("judgements") == len(gone["candidates"])
    assert os.listdir(tmp_path / "ws" / "judgements") == []  # noqa: PTH208
    assert calls() == len(QUESTIONS)
