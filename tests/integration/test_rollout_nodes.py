"""Rollout servers on several nodes: each node starts, feeds and replaces its own."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.rollouts import nodes as on_nodes
from infra.rollouts.nodes import open_on_nodes
from infra.store.traces import read_metrics
from refiner_core.contract.config import RecipeConfig, Resources
from refiner_core.contract.errors import ConfigurationError, RefinerError, StageFailed
from refiner_core.contract.sections.training import RolloutServerConfig
from refiner_core.contract.types import SamplingParams
from refiner_core.training.engines.plain import PlainEngine
from refiner_core.training.model.loading import LoadedModel
from refiner_core.training.ranks import Ranks
from refiner_core.training.rollouts.policies import ServedPolicy
from tests.support.command import Stage, start, wait_until
from tests.support.slurm_cluster import Cluster
from tests.support.tiny_training import furthest, recipe, tiny_model, tiny_tokenizer
from tests.support.vllm_fleet import requests
from tests.support.vllm_processes import control, marked, serving, status
from tests.support.vllm_server import shim

PARAMS, ASKED = SamplingParams(max_new_tokens=20), requests(6)


class Threads(Ranks):
    """Two ranks, one on each node, as threads."""

    world = 2

    def __init__(self, rank: int, barrier: threading.Barrier, shared: dict[str, Any]) -> None:
        self.rank, self._barrier, self.shared = rank, barrier, shared

    def broadcast(self, value: Any) -> Any:
        if self.rank == 0:
            self.shared["value"] = value
        self._barrier.wait()
        value = self.shared["value"]
        self._barrier.wait()
        return value

    def all_or_none(self, error: BaseException | None) -> None:
        self.shared[f"error {self.rank}"] = error
        self._barrier.wait()
        errors = [self.shared[f"error {rank}"] for rank in range(2)]
        self._barrier.wait()
        for met in (error, *errors):
            if met is not None:
                raise met


class Nodes:
    """Two nodes: the first in this thread, the second in another."""

    def __init__(self, tmp_path: Path, **server: Any) -> None:
        self.work = [tmp_path / "work-0", tmp_path / "work-1"]
        self.memory = [tmp_path / "memory-0", tmp_path / "memory-1"]
        for folder in self.memory:
            folder.mkdir()
        self.server, self.models = server, [tiny_model(), tiny_model(1)]
        barrier, shared = threading.Barrier(2, timeout=90), dict[str, Any]()
        self.ranks = [Threads(rank, barrier, shared) for rank in range(2)]
        self.over = threading.Event()

    def config(self, node: int) -> RecipeConfig:
        server = RolloutServerConfig(**{"weights_dir": str(self.memory[node]), **self.server})
        return recipe(
            grpo={
                "generation_backend": "vllm",
                "generation_batch_size": 64,
                "max_token_length": 128,
                "resources": Resources(nodes=2),
                "rollout_server": server,
            }
        )

    @contextmanager
    def opened(self) -> Iterator[ServedPolicy]:
        """The first node's policy, with the weights of the first model; the second node follows
        from one sync to the next."""
        second = threading.Thread(target=self._follow)
        second.start()
        try:
            with self._open(0) as generator:
                policy = ServedPolicy(generator)
                self.sync(policy, 0)
                yield policy
        finally:
            self.over.set()
            second.join()

    def sync(self, policy: ServedPolicy, version: int) -> None:
        policy.sync(self._engine(0, version), version)

    def _follow(self) -> None:
        with contextlib.suppress(RefinerError), self._open(1) as writer:
            policy = ServedPolicy(None, writer)
            for version in range(len(self.models)):
                policy.sync(self._engine(1, version), version)
            self.over.wait()

    def _open(self, node: int) -> Any:
        return open_on_nodes(
            *(self.config(node), tiny_tokenizer(), self.work[node], self.ranks[node])
        )

    def _engine(self, node: int, version: int) -> Any:
        loaded = LoadedModel(copy.deepcopy(self.models[version]), tiny_tokenizer(), False, None)
        config = self.config(node).model
        return PlainEngine(loaded, config, self.ranks[node], learning_rate=1.0)


@pytest.fixture
def as_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' server is the `vllm` that is found, and nodes have an address of their own."""
    monkeypatch.setenv("PATH", f"{shim(tmp_path / 'bin')}:/usr/bin:/bin")
    monkeypatch.setattr(on_nodes, "node_address", lambda: "127.0.0.2")


@pytest.mark.slow
@pytest.mark.usefixtures("as_nodes")
def test_servers_of_both_nodes_sample_and_are_replaced_on_their_own(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with nodes.opened() as policy:
        assert [len(serving(work)) for work in nodes.work] == [1, 1]
        generator = policy._servers
        assert generator is not None
        near, far = generator.fleet.endpoints()
        assert (near.url[:16], far.url[:16]) == ("http://127.0.0.1", "http://127.0.0.2")
        assert near.key != far.key
        resume = f"{far.url.removesuffix('/v1')}/resume"
        assert [status(resume, key) for key in ("", f"Bearer {far.key}")] == [401, 200]
        # New weights reach both, and samples do not depend on the server.
        nodes.sync(policy, 1)
        wanted = policy.generate(ASKED, PARAMS)
        assert furthest(nodes.models[1], ASKED, wanted, PARAMS) < 1e-4
        # kill -9 of the other node's server, with requests in hand.
        [server] = serving(nodes.work[1])
        control(near, slow_s=0.02)
        control(far, slow_s=0.02, die_after=2)
        assert [c.token_ids for c in policy.generate(ASKED, PARAMS)] == [
            c.token_ids for c in wanted
        ]
        [successor] = serving(nodes.work[1])
        assert successor.pid != server.pid
        assert generator.fleet.endpoints()[1] != far
    assert [marked(work) for work in nodes.work] == [[], []]
    assert [list(folder.iterdir()) for folder in nodes.memory] == [[], []]


@pytest.mark.usefixtures("as_nodes")
def test_an_unusable_folder_on_one_node_ends_all(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.memory[1] = tmp_path / "nothing"
    with pytest.raises(ConfigurationError, match="nothing"), nodes.opened():
        pass
    assert list(nodes.memory[0].iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("as_nodes")
def test_a_server_that_does_not_start_on_another_node_gives_its_reason(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, setup=("case $REFINER_OUTPUT in */1-0) echo no driver; exit 3;; esac",))
    with pytest.raises(StageFailed, match="no driver"), nodes.opened():
        pass
    assert [marked(work) for work in nodes.work] == [[], []]
    assert [list(folder.iterdir()) for folder in nodes.memory] == [[], []]


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_on_two_nodes_samples_on_servers_of_both_and_saves_on_sigterm(
    slurm: Cluster,
    tmp_path: Path,
    small: tuple[str, ...],
    with_data: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under ZeRO-3, so that weights are gathered for both nodes."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the nodes are one machine
    profile = tmp_path / "profile.yaml"
    profile.write_text(json.dumps({"name": "test", "cpu_stages": "slurm"}))
    stage = Stage(tmp_path / "runs", "grpo")
    process = start(
        *("run", "tiny", f"workspace={with_data(tmp_path / 'runs')}", "--no-server", *small),
        *("stages=[data,grpo]", "grpo.resources.nodes=2", "grpo.num_training_steps=6"),
        *("grpo.save_freq=6", "grpo.deepspeed_stage=3", "grpo.generation_backend=vllm"),
        f"grpo.rollout_server.setup=['export PATH={shim(tmp_path / 'bin')}:$PATH']",
        *("dispatch.executor=slurm", f"dispatch.profile={profile}"),
        *("dispatch.scheduler_poll_s=0.5", "dispatch.backoff_s=0.5"),
    )
    wait_until(lambda: stage.steps() or process.poll() is not None, "a step", 600)
    job = json.loads((stage.attempts[0] / "job.json").read_text())["job_id"]
    slurm.run("scancel", "--signal=TERM", str(job))
    _, told = process.communicate(timeout=600)
    assert process.returncode == 0, told
    first, second = stage.attempts
    outcome = json.loads((first / "outcome.json").read_text())["outcome"]
    assert outcome["failure"] == "interrupted", "asked, and not killed"
    resumed = json.loads((second / "started.json").read_text())["resumed"]
    assert resumed["step"] == len(read_metrics(first / "metrics.jsonl")), "nothing was lost"
    report = stage.result()["report"]
    assert (report["ranks"], report["nodes"], report["steps"]) == (2, 2, 6)
    assert report["engine"] == "DeepSpeed ZeRO-3"
    assert stage.steps() == list(range(1, 7))
    assert not list(stage.folder.glob("attempts/*/nodes.json")), "no key is left lying about"
    lines = read_metrics(second / "metrics.jsonl")
    # Of samples of either server: those of another model would be far off.
    assert all(line.metrics.get("val/sampler_logprob_gap", 0) < 1e-3 for line in lines)
    log = (second / "log.txt").read_text()
    assert "[rollouts] " in log
    assert "[rank 1] [rollouts 1] " in log
    assert not marked(stage.folder)
