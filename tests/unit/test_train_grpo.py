"""A GRPO step: its samples, the ones it leaves out, its metrics and rollouts."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from refiner_core.contract.errors import Interrupted, JudgeOutage, StageFailed
from refiner_core.contract.types import Completion, PromptRow, RewardResult
from refiner_core.data.prepared import write_prompts
from refiner_core.judges import LexicalJudge
from refiner_core.training.rollouts.rollout import RolloutSample, form_groups, rollout_rows
from refiner_core.training.rollouts.single_turn import SingleTurnTask
from tests.support.threaded_judge import ThreadedJudge
from tests.support.tiny_training import (
    EOS,
    AnsweringSampler,
    LiveSampler,
    TrainRun,
    count_low_words,
    prompts,
    recipe,
    save_answering_inputs,
    save_data,
    save_tiny_model,
    tiny_tokenizer,
)


class Run(TrainRun):
    """GRPO on the tiny model with a sampler that follows it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, root)
        save_data(root / "data")
        save_tiny_model(root / "model")
        self.sampler = LiveSampler()

    def answer(self, judge: Any) -> None:
        """From now on the model answers, and a judge reads the answers."""
        save_answering_inputs(self.root)
        self.sampler, self.rewards, self.judge = AnsweringSampler(), None, judge

    def moved(self) -> bool:
        """Whether the exported weights differ from the ones that came in."""
        files = (self.root / "model", self.root / "out/model")
        before, after = (load_file(folder / "model.safetensors") for folder in files)
        return any(not torch.equal(before[name], after[name]) for name in before)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_the_first_step_is_on_policy(run):
    """Ratio exactly 1, no distance from the reference, and the sampler's log-probs are ours."""
    run(num_training_steps=1, temperature=0.7)
    (row,) = run.io.metrics()
    assert row["val/ratio"] == 1.0
    assert row["policy/clipfrac_avg"] == 0.0
    assert abs(row["objective/kl1_avg"]) < 1e-6
    assert row["val/sampler_logprob_gap"] < 1e-5
    assert row["val/importance_weight"] == pytest.approx(1.0, abs=1e-5)


def test_the_reward_rises(run):
    """The embedded sampler's log-probabilities are those that the update computes."""
    run.sampler = None
    report = run(num_training_steps=16, beta=0.0, num_samples_per_prompt_rollout=8)
    assert max(gap or 0 for gap in run.column("val/sampler_logprob_gap")) < 1e-4
    scores = [value for _, value in report["curves"]["scores"]]
    assert sum(scores[-4:]) / 4 > sum(scores[:4]) / 4 + 0.1


def test_the_loss_does_not_depend_on_how_samples_fall_into_packs(run):
    rows = []
    for pack_length, batch_size in ((16, 1), (64, 1), (24, 3)):
        run(
            f"{pack_length}",
            num_training_steps=1,
            pack_length=pack_length,
            per_device_train_batch_size=batch_size,
            loss_aggregation="sequence",
        )
        rows.append(run.io.metrics()[0])
    assert rows[0]["packed_ratio"] > rows[1]["packed_ratio"]
    for name in ("loss/policy_avg", "grad_norm"):
        values = [row[name] for row in rows]
        assert values == pytest.approx([values[0]] * 3, rel=1e-4, abs=1e-6)


def test_groups_without_spread_change_no_weight_but_count(run):
    run.rewards = lambda items, *_: [RewardResult("scored", 1.0, {}) for _ in items]
    report = run()
    assert not run.moved()
    assert report["steps"] == 5
    assert report["counts"]["groups/dropped_zero_std"] == 15
    assert report["counts"]["optimizer_steps"] == 0
    assert "loss/total_avg" not in run.io.metrics()[0]


def fail_some(failed: Sequence[int]):
    """Rewards by number of low words, except that the judge fails on these samples of each step."""

    def rewards(items, reward, judge):
        results = count_low_words(items, reward, judge)
        for i in failed:
            results[i] = RewardResult("unscored", None, {"low": 1.0})
        return results

    return rewards


def test_unscored_rollouts_leave_statistics_and_loss_but_are_stored(run):
    run.rewards = fail_some([0, 1])
    run(num_training_steps=1)
    rows = run.io.rollouts()[1]
    assert [row["reward"] for row in rows[:2]] == [None, None]
    assert [row["advantage"] for row in rows[:2]] == [None, None]
    scored = [row["reward"] for row in rows[2:]]
    metrics = run.io.metrics()[0]
    assert metrics["scores"] == pytest.approx(sum(scored) / len(scored))
    assert metrics["objective/low_reward"] == pytest.approx(sum(scored) / len(scored))
    assert metrics["samples/unscored"] == 2
    assert metrics["samples/trained"] <= 10


# ---------------------------------------------------------------- a judge that works meanwhile


def test_a_judge_that_streams_gives_the_run_of_one_that_does_not(run):
    run.answer(LexicalJudge())
    report = run("plain", num_training_steps=3)
    metrics, rollouts = run.io.comparable_metrics(), run.io.rollouts()
    assert 0 < report["counts"]["samples/malformed"] < 36
    assert report["counts"]["optimizer_steps"] > 0
    assert "judge" not in report
    run.answer(ThreadedJudge())
    streamed = run("streamed", num_training_steps=3)
    usage = streamed.pop("judge")
    assert (streamed, run.io.comparable_metrics(), run.io.rollouts()) == (report, metrics, rollouts)
    assert run.judge.at_once == 0
    assert usage["asked"] == sum(len(asked) for asked in run.judge.submitted)
    assert sum(run.column("judge/asked")) == usage["asked"]


def test_the_judge_has_the_first_sample_while_the_second_is_decoded(run):
    judge = ThreadedJudge()
    had: list[int] = []

    class Watching(AnsweringSampler):
        def _one(self, request, params):
            had.append(len(judge.submitted))
            return super()._one(request, params)

    run.answer(judge)
    run.sampler = Watching()
    run(num_training_steps=1)
    assert had[0] == 0
    assert had[-1] >= 6  # of eleven samples before it; a malformed one asks nothing
    assert all(later - earlier in (0, 1) for earlier, later in pairwise(had))


@pytest.mark.slow
@pytest.mark.parametrize("error", [JudgeOutage("nobody is there"), Interrupted("asked to stop")])
def test_a_judge_error_in_the_middle_of_a_step_costs_that_step_alone(run, error):
    run.answer(ThreadedJudge())
    whole = run("whole", save_freq=100)
    metrics = run.io.comparable_metrics()
    first_three = sum(len(r) - _malformed(r) for s, r in run.io.rollouts().items() if s <= 3)
    run.answer(ThreadedJudge())
    run.judge.error = (first_three + 4, error)
    with pytest.raises(type(error), match=str(error)[:5]):
        run("cut", save_freq=100)
    assert run.io.checkpoint_steps() == [3]
    run.answer(ThreadedJudge())
    assert run("cut", save_freq=100) == whole
    assert run.io.comparable_metrics() == metrics


def _malformed(rows) -> int:
    return sum(row["status"] == "malformed" for row in rows)


def test_a_long_step_reports_its_progress(run, monkeypatch):
    """Minutes without progress are taken for a hang."""
    now = iter(range(10**6))
    monkeypatch.setattr(
        "refiner_core.training.steps.checkpoint_manager.time.monotonic", lambda: float(next(now))
    )
    run.answer(ThreadedJudge())
    run(num_training_steps=1)
    told = [(p.phase, dict(p.values)) for p in run.io.progressed]
    assert [phase for phase, _ in told][:1] == ["generate"]
    assert ("generate", {"samples_finished": 12.0, "samples": 12.0}) in told
    assert ("judge", {"samples_judged": 12.0, "samples": 12.0}) in told


def test_rollouts_hold_all_that_a_reward_can_be_recomputed_from(run):
    run(num_training_steps=2)
    rows = run.io.rollouts()[2]
    assert [(r["step"], r["sample_index"]) for r in rows[:5]] == [(2, i) for i in (0, 1, 2, 3, 0)]
    row = rows[0]
    assert row["sample_id"] == f"prompt-{row['prompt_index']}"
    assert len(row["logprobs"]) == len(row["response_ids"])
    assert row["reward/low"] == row["reward"]
    assert json.loads(row["judgements"]) == [{"kind": "count"}]
    text = row["response_ids"][:-1] if row["finish_reason"] == "stop" else row["response_ids"]
    assert row["response_text"].split() == [f"w{i}" for i in text]


class Saying:
    """A sampler that always says the same; -1 is the log-probability of each token."""

    def __init__(self, *token_ids: int, finish_reason: str = "stop") -> None:
        logprobs = (-1.0,) * len(token_ids)
        self.completion = Completion(token_ids, logprobs, finish_reason)

    def generate(self, requests, params, on_completion):
        for i in reversed(range(len(requests))):
            on_completion(i, self.completion)
        return [self.completion] * len(requests)


def sampled(sampler: Saying) -> list[RolloutSample]:
    """What the step makes of a sampler's completions of one prompt."""
    turn_task, tokenizer, made = SingleTurnTask(recipe(), None), tiny_tokenizer(), {}
    wanted = turn_task.wanted(prompts(9), 1, (0,))
    turn_task.sample(sampler, tokenizer, wanted, made.__setitem__)
    return [turn_task.read(tokenizer, one, made[place]) for place, one in enumerate(wanted)]


@pytest.mark.parametrize(
    ("sampler", "trained"),
    [
        (Saying(5, 6), (5, 6, EOS)),  # at a stop string
        (Saying(5, 6, EOS), (5, 6, EOS)),
        (Saying(5, 6, finish_reason="length"), (5, 6)),
    ],
)
def test_an_end_is_appended_where_the_sampler_stopped_without_one(sampler, trained):
    samples = sampled(sampler)
    results = [RewardResult("scored", float(i), {}) for i in range(len(samples))]
    batch = form_groups(samples, results, size=len(samples), normalization="standard")
    kept = batch.train_samples(mask_truncated=False)[0]
    assert kept.response_ids == trained
    appended = [math.isnan(logprob) for logprob in kept.sampler_logprobs]
    assert appended == [i >= len(sampler.completion.token_ids) for i in range(len(trained))]
    assert rollout_rows(1, batch)[0]["response_ids"] == list(sampler.completion.token_ids)


def test_the_ground_truth_stays_out_of_what_is_stored():
    told = replace(prompts(1)[0], truth={"gold_ids": ["CANARY"]})
    sample = RolloutSample(0, 0, told, Completion((5,), (-1.0,), "stop"), "w5")
    batch = form_groups(
        [sample], [RewardResult("scored", 1.0, {})], size=1, normalization="centered"
    )
    assert "CANARY" not in json.dumps(rollout_rows(1, batch))


def test_truncated_completions_are_masked_after_the_group_statistics():
    prompt = PromptRow("p", "q", "t", (3, 4), "{}")
    samples = [
        RolloutSample(0, i, prompt, Completion((5, 6), (-1.0, -1.0), reason), "w5 w6")
        for i, reason in enumerate(("length", "stop", "stop", "stop"))
    ]
    results = [RewardResult("scored", float(i), {}) for i in range(4)]
    batch = form_groups(samples, results, size=4, normalization="centered")
    kept = batch.train_samples(mask_truncated=True)
    assert [sample.advantage for sample in kept] == [-0.5, 0.5, 1.5]
    assert len(batch.train_samples(mask_truncated=False)) == 4


def test_a_long_prompt_has_the_room_that_is_left(run):
    write_prompts(
        run.root / "data/rl_train.parquet",
        [*prompts(6), PromptRow("long", "q", "t", (5,) * 40, "{}")],
    )
    run(max_token_length=42, pack_length=42, num_training_steps=2)
    lengths = {
        row["sample_id"]: len(row["response_ids"])
        for rows in run.io.rollouts().values()
        for row in rows
    }
    assert lengths.get("long", 0) <= 2


def test_a_loss_that_is_not_finite_stops_the_stage(run):
    run.rewards = lambda items, *_: [
        RewardResult("scored", math.nan if i == 0 else float(i), {}) for i in range(len(items))
    ]
    with pytest.raises(StageFailed, match="grpo step 1"):
        run()
