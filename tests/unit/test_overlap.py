"""Sampling and judging at once, with the judge over HTTP: nothing waits that could go on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.types import JudgeUsage
from refiner_core.judges import build_judge
from refiner_core.judges.surroundings import MemoryStore, Surroundings
from refiner_core.training.grpo import train_grpo
from refiner_core.training.model import loading
from tests.support.judge_server import JudgeServer, Reply, completion, digest_of
from tests.support.stage_io import FolderStageIO
from tests.support.tiny_training import AnsweringSampler, recipe, save_answering_inputs

WAIT_S = 30.0


class Scripted:
    """Yes or no by what is asked; says when it was first asked."""

    def __init__(self) -> None:
        self.first = threading.Event()
        self.broken = False
        self.asked = 0

    def __call__(self, body: dict[str, Any], call: int) -> Reply:
        self.asked += 1
        self.first.set()
        if self.broken:
            return Reply(status=400)
        said = json.dumps({"score": 2 * (digest_of(body) % 2)})
        return completion(said, usage={"prompt_tokens": 50, "completion_tokens": 5})


class WaitingSampler(AnsweringSampler):
    """Does not end its last sample before the judge's server was asked about an earlier one."""

    def __init__(self, script: Scripted, samples: int) -> None:
        super().__init__()
        self.script, self.left = script, samples

    def _one(self, request, params):
        self.left -= 1
        if self.left == 0:
            assert self.script.first.wait(WAIT_S), "the judge waited for the last sample"
        return super()._one(request, params)


@pytest.fixture
def script() -> Scripted:
    return Scripted()


@pytest.fixture
def server(script: Scripted) -> Iterator[JudgeServer]:
    with JudgeServer(script) as server:
        yield server


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: JudgeServer):
    """One GRPO step of twelve rollouts by the judge on ``server``; returns (report, io, usage)."""
    save_answering_inputs(tmp_path)
    load = loading.load_for_training

    def run(name: str, sampler: Any, store: MemoryStore | None = None) -> Any:
        def load_and_tell(*args: Any) -> Any:
            loaded = load(*args)
            sampler.model = loaded.model
            return loaded

        monkeypatch.setattr(loading, "load_for_training", load_and_tell)
        config = recipe(grpo={"num_training_steps": 1})
        judging = JudgeConfig(
            kind="openai", model="scripted", base_url=server.base_url, max_retries=0
        )
        judge: Any = build_judge(judging, Surroundings(store=store))
        io = FolderStageIO(tmp_path / name)
        try:
            report = train_grpo(
                replace(config, judge=judging),
                data_dir=tmp_path / "data",
                model_ref=str(tmp_path / "model"),
                output_dir=tmp_path / name,
                io=io,
                judge=judge,
                generator=sampler,
            )
            usage: JudgeUsage = judge.usage()
        finally:
            judge.close()
        return report, io, usage

    return run


def test_the_server_is_asked_before_the_last_sample_is_there(train, script):
    report, io, usage = train("run", WaitingSampler(script, samples=12))
    row = io.metrics()[0]
    assert row["samples/unscored"] == 0
    assert row["judge/calls"] == usage.calls == script.asked > 0
    assert row["judge/asked"] == usage.asked >= usage.calls
    assert row["judge/prompt_tokens"] == 50 * script.asked
    assert row["judge/latency_mean_s"] > 0
    assert report["judge"]["answers"] == {"200": script.asked}


def test_a_step_that_is_repeated_costs_no_calls_and_is_the_same_step(train, script):
    store = MemoryStore()
    _, first, _ = train("first", AnsweringSampler(), store)
    assert first.metrics()[0]["optimizer_steps"] == 1
    asked = script.asked
    _, again, usage = train("again", AnsweringSampler(), store)
    assert script.asked == asked
    assert (usage.calls, usage.stored) == (0, usage.asked)
    assert again.metrics()[0]["judge/stored"] == usage.asked
    assert again.rollouts() == first.rollouts()
    assert again.comparable_metrics() == first.comparable_metrics()
