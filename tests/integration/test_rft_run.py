"""Rejection sampling and fine-tuning on a real orchestrator, killed in the middle.

What would break for a user: a night of sampling that a node failure throws away, other attempts
after a restart than before it, a stage `rft` that trains on something else than what was kept.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from infra.rollouts.servers import open_sampler
from infra.store.checkpoints import hash_of
from refiner_core.contract.config import RecipeConfig, SampleConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.records import from_json
from refiner_core.contract.sections.training import RolloutServerConfig
from refiner_core.data.prepared import load_demonstrations
from refiner_core.judges import LexicalJudge
from refiner_core.rejection.attempts import RejectionAttempt, load_attempts
from refiner_core.rejection.stage import sample_attempts
from tests.support.command import Stage, called, start, wait_until
from tests.support.stage_io import FolderStageIO
from tests.support.tiny_training import recipe, save_answering_inputs, tiny_tokenizer
from tests.support.vllm_server import shim

RFT = (
    *("stages=[data,rft]", "sample.attempts=2", "sample.generation_batch_size=4"),
    *("sample.success=0.9", "sample.min_partial=0.1"),
    "data.synthetic_rl_rows=20",
    *("rft.max_train_steps=3", "rft.save_freq=1", "rft.pack_length=1024"),
)


def test_killed_sampling_resumes_to_the_same_rows(tmp_path: Path, small: tuple[str, ...]) -> None:
    workspace = tmp_path / "runs"
    process = start("run", "tiny", f"workspace={workspace}", *small, *RFT, "--no-server")
    sample, rft = Stage(workspace, "sample"), Stage(workspace, "rft")
    wait_until(lambda: len(sample.steps()) >= 2, "the second batch")
    sample.kill()
    said, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert len(sample.attempts) == 2

    # What was finished was not sampled again: the second attempt went on behind it.
    resumed = json.loads((sample.attempts[-1] / "started.json").read_text())["resumed"]
    assert resumed["step"] >= 1
    assert [step for step, _ in sample.trace()] == list(range(1, 9))

    report = sample.result()["report"]
    assert report["attempts"]["total"] == 2 * report["prompts"]["total"] == 32
    kept = report["kept"]["demonstrations"]
    assert f"{kept} of 32 attempts kept" in said

    # Without any interruption it is the same to the bit.
    config = from_json(
        RecipeConfig, json.loads((sample.attempts[0] / "intent.json").read_text())["config"]
    )
    data = Stage(workspace, "data").attempts[-1] / "output"
    straight = tmp_path / "straight"
    straight.mkdir()
    sample_attempts(
        config,
        data_dir=data,
        model_ref=config.model.name_or_path,
        output_dir=straight,
        io=FolderStageIO(tmp_path / "io"),
        judge=LexicalJudge(),
    )
    assert {p.name: hash_of(p) for p in straight.iterdir()} == sample.hashes()

    rows = load_demonstrations(straight / "sft_train.parquet")
    trained = rft.result()["report"]
    assert trained["demonstrations"] == len(rows) == kept
    assert trained["steps"] == 3

    listed = called("status", f"workspace={workspace}", "--json").json
    stages = listed["stages"] if "stages" in listed else listed["runs"][0]["stages"]
    assert [(s["name"], s["state"]) for s in stages] == [
        ("data", "done"),
        ("sample", "done"),
        ("rft", "done"),
    ]


def test_attempts_from_servers_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("PATH", f"{shim(tmp_path / 'bin')}:{os.environ['PATH']}")
    save_answering_inputs(tmp_path)
    tokenizer = tiny_tokenizer(answers=True)
    server = RolloutServerConfig(weights_dir=str(memory), start_timeout_s=60.0)
    plain = recipe(grpo={"response_length": 6, "rollout_server": server})
    sampling = SampleConfig(attempts=2, generation_batch_size=8, top_k=1, generation_backend="vllm")
    config = replace(plain, sample=sampling)
    made: dict[str, list[RejectionAttempt]] = {}
    for name, generator in (("served", True), ("here", False)):
        (tmp_path / name).mkdir()
        with (
            pytest.raises(DataError),  # of a model of random numbers
            contextlib.ExitStack() as stack,
        ):
            sample_attempts(
                config,
                data_dir=tmp_path / "data",
                model_ref=str(tmp_path / "model"),
                output_dir=tmp_path / name,
                io=FolderStageIO(tmp_path / f"io-{name}"),
                judge=LexicalJudge(),
                tokenizer=tokenizer,
                generator=stack.enter_context(
                    open_sampler(
                        *(config, "sample", str(tmp_path / "model"), tokenizer),
                        tmp_path / "work",
                        window=config.grpo.max_token_length,
                    )
                )
                if generator
                else None,
            )
        made[name] = load_attempts(tmp_path / name / "attempts.parquet")
    assert [a.token_ids for a in made["served"]] == [a.token_ids for a in made["here"]]
    assert len(made["served"]) == 14
    assert list(memory.iterdir()) == []
