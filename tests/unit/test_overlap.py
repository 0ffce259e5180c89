"""Sampling and judging at once, with the judge over HTTP."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.types import JudgeUsage
from refiner_core.judges import build_judge
from refiner_core.judges.surroundings import Surroundings
from refiner_core.training.grpo import train_grpo
from tests.support.judge_server import JudgeServer, Reply, completion, digest_of
from tests.support.stage_io import FolderStageIO
from tests.support.tiny_training import AnsweringSampler, following, recipe, save_answering_inputs

WAIT_S = 30.0


class Scripted:
    """Yes or no by the question; an event marks the first question."""

    def __init__(self) -> None:
        self.first = threading.Event()
        self.asked = 0

    def __call__(self, body: dict[str, Any], call: int) -> Reply:
        self.asked += 1
        self.first.set()
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


def test_the_server_is_asked_before_the_last_sample_is_there(tmp_path: Path) -> None:
    save_answering_inputs(tmp_path)
    script = Scripted()
    sampler, io = WaitingSampler(script, samples=12), FolderStageIO(tmp_path / "io")
    with JudgeServer(script) as server:
        judging = JudgeConfig(
            kind="openai", model="scripted", base_url=server.base_url, max_retries=0
        )
        judge: Any = build_judge(judging, Surroundings())
        with closing(judge), following(sampler):
            report = train_grpo(
                replace(recipe(grpo={"num_training_steps": 1}), judge=judging),
                data_dir=tmp_path / "data",
                model_ref=str(tmp_path / "model"),
                output_dir=tmp_path / "out",
                io=io,
                judge=judge,
                generator=sampler,
            )
            usage: JudgeUsage = judge.usage()
    (row,) = io.metrics()
    assert row["samples/unscored"] == 0
    assert row["judge/calls"] == usage.calls == script.asked > 0
    assert row["judge/asked"] == usage.asked >= usage.calls
    assert row["judge/prompt_tokens"] == 50 * script.asked
    assert row["judge/latency_mean_s"] > 0
    assert report["judge"]["answers"] == {"200": script.asked}
