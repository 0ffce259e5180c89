"""Ranks of a training: how they start and meet, their bridge to the attempt, their failures."""

import errno
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.ranks import training
from flows.ranks.training import engine_name, in_worker
from infra.attempt.stage_io import AttemptIO
from infra.host.gpus import VISIBLE
from infra.jobs.failures import classify, detailed, traceback_signature
from infra.jobs.signals import AttemptClosed, SlurmJob
from infra.ranks import launch as nodes
from infra.ranks.bridge import ADDRESS, KEY, Bridge, RemoteIO
from infra.ranks.launch import LaunchFailure, OtherNodes, error_of, node_number
from infra.ranks.messages import (
    JOB_GPUS,
    decode,
    encode,
    event_line,
    rank_settings,
    read_event,
    trainer_settings,
    visible,
)
from infra.rollouts import servers as opening
from infra.store.checkpoints import CheckpointStore
from infra.store.layout import StagePaths
from infra.store.traces import read_metrics, read_rollouts
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig, Resources
from refiner_core.contract.errors import (
    ConfigurationError,
    Interrupted,
    JudgeOutage,
    KilledError,
    LaunchError,
    NodeLost,
    NoSpaceError,
    NotFiniteError,
    RefinerError,
    StageFailed,
    UnsupportedError,
)
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.placement import Placement
from refiner_core.contract.types import Progress, SavedCheckpoint
from refiner_core.training.ranks import Ranks
from tests.support.users import STRANGER, needs_users, run_as


class Attempt:
    """A real attempt's IO in this process, and its remote end as rank 0 has it."""

    def __init__(self, folder: Path) -> None:
        self.stage = StagePaths(folder, folder)
        self.fence: Exception | None = None
        self.stop = False
        self.told: list[Progress] = []
        self.room: list[NoSpaceError] = []
        self.store = CheckpointStore(self.stage.checkpoints, 1, fence=self._check_fence)
        self.io = AttemptIO(
            self.stage,
            1,
            self.store,
            on_progress=self.told.append,
            stop_requested=lambda: self.stop,
            wait_for_space=lambda: True,
        )
        self.bridge = Bridge(self.io)

    def _check_fence(self) -> None:
        if self.fence is not None:
            raise self.fence

    def remote(self) -> RemoteIO:
        told = self.bridge.environment
        return RemoteIO(told[ADDRESS].replace("@", "\0", 1), bytes.fromhex(told[KEY]))


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    attempt = Attempt(tmp_path / "stage")
    with attempt.bridge:
        yield attempt


def test_every_call_of_a_stage_arrives(attempt: Attempt) -> None:
    io = attempt.remote()
    assert io.latest_checkpoint() is None
    io.log_metrics(1, {"loss": 0.5, "nan": float("nan")})
    io.save_rollouts(1, [{"text": "a", "scores": {"x": 1.0}}])
    with io.new_checkpoint(1) as folder:
        (folder / "state").write_text("one")
    io.progress(Progress(1, 2, "train", {"loss": 0.5}))
    assert not io.should_stop()
    attempt.stop = True
    assert io.should_stop()
    assert io.latest_checkpoint() == SavedCheckpoint(1, attempt.store.folder / "step-00000001")
    io.finish({"steps": 2})
    assert attempt.bridge.report == {"steps": 2}
    assert attempt.told == [Progress(1, 2, "train", {"loss": 0.5})]
    (line,) = read_metrics(attempt.io.paths.metrics)
    assert line.metrics == {"loss": 0.5, "nan": None}
    (file,) = attempt.io.paths.rollouts.glob("*")
    assert read_rollouts(file) == [{"text": "a", "scores": {"x": 1.0}}]


def test_silent_connections_delay_nobody(attempt: Attempt) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(attempt.remote()._address)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(attempt.remote().should_stop).result(20) is False


def knock(address: str) -> str:
    """The first that this user hears at a socket, in hex."""
    with socket.socket(socket.AF_UNIX) as at:
        at.settimeout(20)
        at.connect(address)
        return at.recv(64).hex()


def test_another_user_is_not_even_asked_for_the_key(attempt: Attempt) -> None:
    needs_users()
    address = attempt.remote()._address
    assert run_as(STRANGER, knock, address) == ""
    assert knock(address) != ""


def test_a_full_disk_is_reported_to_rank_0(attempt: Attempt) -> None:
    """The writer's own words (torch's here) are judged by the store, as in one process."""
    io = attempt.remote()
    words = "PytorchStreamWriter failed writing file"

    def save() -> None:
        with io.new_checkpoint(1) as folder:
            (folder / "half").write_text("half")
            raise RuntimeError(words) from OSError(errno.EDQUOT, "Disk quota exceeded")

    with pytest.raises(NoSpaceError) as caught:
        save()
    assert caught.value.errno == errno.EDQUOT
    assert caught.value.fix.startswith("free some space")
    assert io.room_again(caught.value)
    assert list(attempt.store.folder.iterdir()) == []


def test_a_rank_that_dies_in_a_save_leaves_nothing(attempt: Attempt) -> None:
    io = attempt.remote()
    context = io.new_checkpoint(1)
    (context.__enter__() / "half").write_text("half")
    attempt.bridge.close()
    assert list(attempt.store.folder.iterdir()) == []
    with pytest.raises(KilledError, match="worker"):
        io.should_stop()
    with pytest.raises(KilledError, match="worker"):
        context.__exit__(None, None, None)


def test_a_wrong_key_is_refused(attempt: Attempt) -> None:
    address = attempt.bridge.environment[ADDRESS].replace("@", "\0", 1)
    with pytest.raises(AuthenticationError):
        Client(address, "AF_UNIX", authkey=b"guessed").close()
    assert attempt.remote().latest_checkpoint() is None, "others still are"


# ---------------------------------------------------------------- errors


def travelled(error: BaseException) -> Exception:
    return decode(json.loads(json.dumps(encode(error))), "In rank 1")


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


class Torchlike(RuntimeError):
    """Of a class that only the rank knows."""


Torchlike.__name__ = Torchlike.__qualname__ = "OutOfMemoryError"
Torchlike.__module__ = "torch"


@pytest.mark.parametrize(
    "error",
    [
        ConfigurationError("what", expected="this", fix="that"),
        NotFiniteError("step 3: the loss is nan"),
        JudgeOutage("what", expected="answers"),
        Interrupted("stopped on request"),
        AttemptClosed("what"),
        MemoryError("host"),
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("NCCL error: unhandled system error"),
        Torchlike("CUDA out of memory. Tried to allocate 2.00 GiB"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
    ],
)
def test_an_error_means_the_same_in_another_process(error: Exception) -> None:
    there = raised(error)
    here = travelled(there)
    assert type(here).__name__ == type(there).__name__
    before, after = classify(there), classify(here)
    assert (after.failure, after.decision) == (before.failure, before.decision)
    assert after.exit_code == before.exit_code
    if isinstance(error, RefinerError):
        assert isinstance(here, type(error))
        assert (here.what, here.expected, here.fix) == (error.what, error.expected, error.fix)
    assert traceback_signature(here) == traceback_signature(there)
    assert detailed(after, here, 3).errno == detailed(before, there, 3).errno
    assert any("In rank 1" in note and "raised" in note for note in here.__notes__)


def test_events_are_found_among_printed_lines() -> None:
    long = raised(ConfigurationError("w" * 100_000, fix='"\\' * 50_000), ValueError("v" * 99_999))
    line = event_line("mark", {"event": "error", "rank": 3, "error": encode(long)})
    assert len(line) < 1 << 16
    event = read_event("mark", line)
    assert isinstance(decode(event["error"]), ConfigurationError)
    for other in ("mark", "mark {", "other {}", "", "mark 7"):
        assert read_event("mark", other) is None


# ---------------------------------------------------------------- which failure was first

GONE = RuntimeError("[../gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1")


def failure(code: int, late_s: float = 0.0) -> dict[str, Any]:
    return {"code": code, "pid": 99, "late_s": late_s}


CAUSE, STOPPED = ConfigurationError("mine"), Interrupted("stopped")


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        (
            LaunchFailure(errors=[(0, GONE), (1, CAUSE)], failures={0: failure(1), 1: failure(1)}),
            CAUSE,
        ),
        (LaunchFailure(errors=[(0, STOPPED), (1, GONE)]), STOPPED),
        (LaunchFailure(errors=[(0, STOPPED), (1, CAUSE)]), CAUSE),
        # Killed afterwards, as a consequence.
        (
            LaunchFailure(errors=[(1, CAUSE)], failures={1: failure(1), 0: failure(-11, late_s=3)}),
            CAUSE,
        ),
    ],
)
def test_the_first_cause_counts_and_not_its_consequence(
    ended: LaunchFailure, cause: Exception
) -> None:
    assert error_of(ended) is cause


@pytest.mark.parametrize(
    ("ended", "kind", "says", "expected"),
    [
        (
            LaunchFailure(errors=[(0, GONE)], failures={0: failure(1), 1: failure(-9)}),
            *(KilledError, "Rank 1 (process 99)", "killed"),
        ),
        (LaunchFailure(failures={1: failure(-9)}, oom_kills=1), MemoryError, "", "out_of_memory"),
        (
            LaunchFailure(errors=[(0, GONE)], failures={0: failure(1)}, lost={4: "n7"}),
            *(NodeLost, "Node n7 of the job is gone", "node_failure"),
        ),
        (
            LaunchFailure(
                lines=["DistNetworkError: The server socket has failed: EADDRINUSE"], code=1
            ),
            *(LaunchError, "", "launch_failure"),
        ),
        (
            LaunchFailure(lines=["a", "ImportError: no such thing"], code=1),
            StageFailed,
            "no such",
            "bug",
        ),
    ],
)
def test_silent_ends(ended: LaunchFailure, kind: type[Exception], says: str, expected: str) -> None:
    error = error_of(ended)
    assert isinstance(error, kind)
    assert says in str(error)
    assert classify(error).failure == expected


# ---------------------------------------------------------------- GPUs


def test_ranks_see_the_trainers_gpus() -> None:
    given = {VISIBLE: "4,5,6,7"}
    settings = trainer_settings((0, 1), given)
    assert settings == {VISIBLE: "4,5", JOB_GPUS: "4,5,6,7"}
    inside = {**given, **settings}
    assert visible((2, 3), inside) == "6,7", "a server of the same job, started by a rank"
    assert trainer_settings((), given) == {}
    assert trainer_settings((0, 1), {}) == {VISIBLE: "0,1"}
    with pytest.raises(UnsupportedError, match="was given 4"):
        trainer_settings((4,), given)


# ---------------------------------------------------------------- launching


def recipe(**sft: object) -> RecipeConfig:
    config = RecipeConfig()
    return replace(config, sft=replace(config.sft, **sft))


@pytest.mark.parametrize(
    ("sft", "here", "engine"),
    [
        ({}, True, "torch"),
        ({"deepspeed_stage": 0}, True, "torch"),
        ({"nproc_per_node": 2}, False, "torch"),
        ({"deepspeed_stage": 2}, False, "DeepSpeed ZeRO-2"),
        ({"resources": Resources(gpus=1)}, True, "torch"),
        ({"resources": Resources(gpus=2)}, False, "torch"),
        ({"resources": Resources(nodes=2)}, False, "torch"),
    ],
)
def test_one_process_is_the_worker_itself(sft: dict[str, object], here: bool, engine: str) -> None:
    config = recipe(**sft)
    assert in_worker(config, "sft") is here
    assert engine_name(config, "sft") == engine


def test_ranks_of_one_node_use_loopback() -> None:
    one = rank_settings(Placement(1, 2), {})
    assert (one["GLOO_SOCKET_IFNAME"], one["DS_ACCELERATOR"]) == ("lo", "cpu")
    assert rank_settings(Placement(1, 2, (0, 1)), {})["NCCL_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in rank_settings(Placement(1, 2), {"GLOO_SOCKET_IFNAME": "ib0"})
    several = rank_settings(Placement(2, 2, (0, 1)), {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & several.keys()
    assert "DS_ACCELERATOR" not in several
    assert several["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_node_knows_its_number_from_slurm_alone() -> None:
    assert node_number({}) == 0
    assert node_number({"SLURM_NODEID": "3"}) == 0
    assert node_number({"SLURM_JOB_ID": "7", "SLURM_NODEID": "3"}) == 3


# ---------------------------------------------------------------- other nodes come


@contextmanager
def knocking(control: Path, *, silent: int, key: str = "") -> Iterator[threading.Event]:
    """A node at the worker's door, and connections before it that say nothing."""
    note = json.loads((control / "nodes.json").read_text())
    address, gone = (note["address"], note["port"]), threading.Event()
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        for _ in range(silent):
            stack.enter_context(socket.create_connection(address))

        def come() -> None:
            with Client(address, "AF_INET", authkey=bytes.fromhex(key or note["key"])) as client:
                client.send_bytes(json.dumps({"node": 1, "host": "n1"}).encode())
                assert gone.wait(60)

        coming = pool.submit(come)
        try:
            yield gone
        finally:
            gone.set()
        if not key:
            coming.result(60)


def test_silent_connections_delay_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port scan, or a neighbour on the network, while the worker waits for its nodes."""
    monkeypatch.setattr(nodes, "_COME_S", 60.0)
    with OtherNodes(tmp_path, SlurmJob("1"), 1) as others, knocking(tmp_path, silent=3):
        others.start(["true", "true"], {})


def test_a_node_whose_connection_ends_without_a_last_message_is_lost(tmp_path: Path) -> None:
    with OtherNodes(tmp_path, SlurmJob("1"), 1) as others:
        with knocking(tmp_path, silent=0):
            others.start(["true", "true"], {})
            assert others.lost == {}
        list(others.last_lines())
        assert others.lost == {1: "n1"}


def test_missing_nodes_are_awaited_up_to_the_limit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(nodes, "_COME_S", 1.0)
    with (
        OtherNodes(tmp_path, SlurmJob("1"), 1) as others,
        knocking(tmp_path, silent=2, key="00" * 32),
        pytest.raises(LaunchError, match="Only 0 of the job's 1 other nodes connected in 1 s"),
    ):
        others.start(["true", "true"], {})


# ---------------------------------------------------------------- rollout servers


def test_an_attempt_finds_the_servers_of_the_attempt_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold GPUs; a mark of each attempt's own would let them stay."""
    folders: list[Path] = []
    monkeypatch.setattr(
        opening, "open_vllm", lambda config, tokenizer, workdir, **_: folders.append(workdir)
    )
    work: Any = SimpleNamespace(
        config=load_recipe("tiny"), io=SimpleNamespace(should_stop=bool), stage_id="grpo-1",
        workspace=Workspace.open(tmp_path), starts=str,
    )  # fmt: skip
    engine: Any = SimpleNamespace(tokenizer=None, ranks=Ranks())
    for work.attempt in (1, 2):
        training._rollout_servers(work, engine)
    work.stage_id = "grpo-2"
    training._rollout_servers(work, engine)
    assert folders[0] == folders[1] != folders[2]
