"""The GPUs of a plan: how many at the same time, who sits where, and whether they can be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.checking.resources import gpu_lines, gpu_use, gpus_json
from flows.running.calls import make_recipe_plan
from refiner_core.contract.plan import Plan
from tests.support.gpus import invented


def large(name: str = "refiner-gpt54", *words: str) -> Plan:
    return make_recipe_plan(name, ["workspace=/tmp/none", *words])


def test_the_large_recipe_says_how_many_gpus_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    invented(monkeypatch, 8)
    use = gpu_use(large())
    assert use is not None
    assert [(job.stage, job.gpus) for job in use.jobs] == [("grpo", 8), ("judge", 4)]
    assert (use.at_once, use.most) == (12, 13), "another stage is evaluated meanwhile"
    text = "\n".join(gpu_lines(large()))
    assert "12 at the same time (2 jobs: grpo 8 + judge 4 GPUs)" in text
    assert "| grpo: r0  r1  r2  r3  s0  s1  s2  s3 | judge: j   j   j   j" in text
    assert "Impossible here: grpo needs 12 GPUs of this machine" in text


def test_the_recipe_for_one_node_fits_and_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    invented(monkeypatch, 8)
    plan = large("refiner-one-node")
    use = gpu_use(plan)
    assert use is not None
    assert (use.at_once, use.lacks) == (8, "")
    assert plan.by_name["grpo"].fingerprint == large().by_name["grpo"].fingerprint
    grpo = plan.config.grpo
    rollouts = grpo.num_unique_prompts_rollout * grpo.num_samples_per_prompt_rollout
    assert rollouts % sum(cell.startswith("r") for cell in use.jobs[0].layout[0]) == 0


def test_a_judge_beside_its_trainer_sits_on_the_trainers_node() -> None:
    words = ("judge.serve.where=beside", "grpo.resources.gpus=8", "evaluate.resources.gpus=3")
    found = gpus_json(large("refiner-one-node", *words))
    assert found is not None
    assert found["jobs"][0]["layout"] == [["r0", "r1", "r2", "r3", "s0", "s1", "j", "j"]]
    assert [job["stage"] for job in found["jobs"]] == ["grpo"]


def sinfo(folder: Path, monkeypatch: pytest.MonkeyPatch, *nodes: str) -> None:
    """A cluster whose `sinfo` lists these nodes."""
    program = folder / "sinfo"
    lines = "\n".join(f"gpu*|n{number}|{offered}" for number, offered in enumerate(nodes))
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_partition_of_one_node_can_never_run_trainer_and_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge would hold four GPUs, and the trainer queue for ever."""
    sinfo(tmp_path, monkeypatch, "gpu:h100:8(S:0-1)", "(null)")
    lines = gpu_lines(large("refiner-gpt54", "dispatch.executor=slurm"))
    assert "(2 jobs: grpo 8 + judge 4 GPUs)" in lines[0]
    assert lines[1:3] == [
        "  grpo, node 1  | r0  r1  r2  r3  s0  s1  s2  s3",
        "  judge, node 1 | j   j   j   j",
    ]
    assert "the nodes with GPUs are 1 of 8" in lines[-1]
    assert "never" not in gpu_lines(large("refiner-one-node", "dispatch.executor=slurm"))[-1]
    sinfo(tmp_path, monkeypatch, "gpu:8", "gpu:4")
    assert "never" not in gpu_lines(large("refiner-gpt54", "dispatch.executor=slurm"))[-1]


def test_a_plan_without_gpus_says_nothing_about_them() -> None:
    plan = make_recipe_plan("tiny", ["workspace=/tmp/none"])
    assert gpu_lines(plan) == []
    assert gpus_json(plan) is None
