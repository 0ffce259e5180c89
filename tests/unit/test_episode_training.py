"""GRPO on episodes: the rollouts, the metrics, the errors, and resume."""

import json
from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.errors import ConfigurationError, EnvironmentOutage
from refiner_core.contract.sections.environment import ShapingConfig
from refiner_core.contract.sections.training import CurriculumConfig
from refiner_core.environments.protocol import record_from_json
from refiner_core.environments.scoring import shaped_reward
from tests.support.counting import CountingEpisode
from tests.support.episode_training import CallingSampler, EpisodeRun, Troubled, recipe, save_inputs

STEPS = 3
EPISODES = 6 * STEPS


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return save_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module", autouse=True)
def _calls():
    """The sampler knows the grammar of calls."""
    with pytest.MonkeyPatch.context() as patch:
        backend = "refiner_core.generation.transformers_backend.TransformersGenerator"
        patch.setattr(backend, CallingSampler)
        yield


@pytest.fixture
def new(inputs, tmp_path):
    def make(name: str = "run", environment: dict[str, Any] | None = None, **grpo: Any):
        return EpisodeRun(inputs, tmp_path / name, recipe(environment, **grpo))

    return make


@pytest.fixture(scope="module")
def straight(inputs, tmp_path_factory):
    """A run without interruptions: itself, its report, its outcome."""
    run = EpisodeRun(inputs, tmp_path_factory.mktemp("straight"), recipe())
    report = run()
    return run, report, run.outcome()


# ---------------------------------------------------------------- what a step is


def test_rollouts_keep_all_that_a_reward_and_a_loss_can_be_recomputed_from(straight):
    run, _, outcome = straight
    seen = set()
    for rows in outcome["rollouts"].values():
        assert len(rows) == 6
        for row in rows:
            record = record_from_json(json.loads(row["episode"]))
            result = shaped_reward(record, run.config.environment)
            assert row["reward"] == result.total
            assert row["status"] == result.status
            assert row["reward/success"] == float(record.success)
            assert [p is not None for p in row["logprobs"]] == row["own"]
            assert len(row["own"]) == len(row["response_ids"])
            inside = [False] * len(row["own"])
            for turn in record.turns:
                assert turn.seconds == 0.0  # no run repeats it
                inside[turn.start : turn.end] = [True] * (turn.end - turn.start)
            assert inside == row["own"]
            seen |= {record.ended, record.success}
    assert {"turn_limit", "done", True, False} <= seen


def test_metrics_count_successes_turns_and_tokens(straight):
    run, report, outcome = straight
    for row in run.io.metrics():
        rows = outcome["rollouts"][row["step"]]
        records = [record_from_json(json.loads(r["episode"])) for r in rows]
        solved = [record.success for record in records]
        assert row["episodes/success"] == pytest.approx(sum(solved) / 6)
        assert row["episodes/successes"] == sum(solved)
        for domain in {record.domain for record in records}:
            own = [r for r in records if r.domain == domain]
            share = sum(r.success for r in own) / len(own)
            assert row[f"episodes/success/{domain}"] == pytest.approx(share)
        assert row["episodes/turns"] == pytest.approx(sum(len(r.turns) for r in records) / 6)
        assert row["episodes/own_tokens"] == pytest.approx(sum(sum(r["own"]) for r in rows) / 6)
        failed = sum(row[f"episodes/failed/{name}"] for name in ("limit", "no_call", "incomplete"))
        assert failed == 6 - sum(solved)
        stopped = sum(record.ended != "turn_limit" for record in records)
        assert row["val/stop_rate"] == pytest.approx(stopped / 6)
    assert report["domains"]["near"]["attempts"] + report["domains"]["far"]["attempts"] == EPISODES
    successes = sum(run.column("episodes/successes"))
    assert sum(domain["successes"] for domain in report["domains"].values()) == successes > 0
    assert report["counts"]["episodes/successes"] == successes
    own = sum(sum(r["own"]) for rows in outcome["rollouts"].values() for r in rows)
    assert report["tokens"] == own


def test_the_sampler_and_the_trainer_score_the_same_tokens(straight):
    """Own log-probabilities that are off by one, or a conversation tokenised again, would show."""
    gaps = [gap for gap in straight[0].column("val/sampler_logprob_gap") if gap is not None]
    assert gaps
    assert max(gaps) < 1e-5


def test_partial_credit_gives_direction_where_no_episode_succeeds(new):
    """The goal cannot be reached within the turns."""
    plain = new("plain", {"max_turns": 2, "shaping": ShapingConfig(alpha=0.0)})
    shaped = new("shaped", {"max_turns": 2, "shaping": ShapingConfig(alpha=0.25)})
    plain()
    shaped()
    assert plain.column("episodes/successes") == shaped.column("episodes/successes") == [0] * STEPS
    assert plain.column("groups/kept") == [0] * STEPS
    assert sum(shaped.column("groups/kept")) > 0


def test_an_unparsable_end_fails_or_is_left_out_by_name(new):
    failure = new("failure", {"repairs": 0})
    exclude = new("exclude", {"repairs": 0, "unparsable": "exclude", "max_error_share": 0.0})
    failed, excluded = failure(), exclude()
    assert failed["counts"]["episodes/excluded"] == 0
    assert failed["counts"]["samples/malformed"] > 0
    assert excluded["counts"]["episodes/excluded"] > 0
    assert excluded["counts"]["samples/malformed"] == 0
    assert excluded["counts"]["episodes/errors"] == 0
    for run, total in ((failure, 0.0), (exclude, None)):
        ends = [
            row["reward"]
            for rows in run.io.rollouts().values()
            for row in rows
            if json.loads(row["episode"])["ended"] == "no_call"
        ]
        assert set(ends) == {total}


def test_a_curriculum_weighs_by_the_attempts_before_and_counts_all(new):
    section = CurriculumConfig(enabled=True, min_attempts=3, low=0.4, low_weight=0.5)
    run = new(curriculum=section)
    report = run()
    attempts: dict[str, list[bool]] = {}
    for _, rows in sorted(run.io.rollouts().items()):
        for row in rows:
            before = attempts.get(row["sample_id"], [])
            rate = sum(before) / len(before) if before else None
            wanted = 1.0 if rate is None else 0.1 if rate > 0.75 else 0.5 if rate < 0.4 else 1.0
            assert row["curriculum_weight"] == wanted
        for row in rows:
            solved = json.loads(row["episode"])["reward"] == 1.0
            attempts.setdefault(row["sample_id"], []).append(solved)
    assert any(weight is not None for weight in run.column("curriculum/weight"))
    assert sum(d["attempts"] for d in report["domains"].values()) == EPISODES


# ---------------------------------------------------------------- interruptions


@pytest.mark.parametrize(
    "grpo",
    [
        {"active_sampling": True},
        {"num_mini_batches": 2, "async_steps": 2},
        {"curriculum": CurriculumConfig(enabled=True, min_attempts=3, low=0.4)},
    ],
    ids=["active", "async", "curriculum"],
)
def test_stopped_after_steps_it_resumes_bitwise(new, grpo):
    whole, cut = new("whole", **grpo), new("cut", save_freq=100, **grpo)
    report = whole()
    assert cut.stopped_after(1, 2) == report
    assert cut.outcome() == whole.outcome()


@pytest.mark.parametrize("behind", [0, 1])
def test_broken_off_while_sampling_or_saving_it_ends_as_if_it_had_not_been(
    new, monkeypatch, behind, straight
):
    run = new(async_steps=behind)
    for at in (5, 20):
        monkeypatch.setattr(CallingSampler, "fail_at", at)
        with pytest.raises(RuntimeError, match="while generating"):
            run()
    monkeypatch.setattr(CallingSampler, "fail_at", None)
    run.io.fail_save_at = 3
    with pytest.raises(OSError, match="while saving"):
        run()
    run.io.fail_save_at = None
    report = run()
    if behind:
        whole = new("whole", async_steps=behind)
        assert whole() == report
        assert run.outcome() == whole.outcome()
    else:
        assert report == straight[1]
        assert run.outcome() == straight[2]


# ---------------------------------------------------------------- the infrastructure fails


def test_few_errors_leave_groups_and_loss_and_are_counted_by_kind(new):
    """Task 4 is of the first step."""
    run = new(environment={"max_error_share": 0.5}, num_training_steps=1)
    run.environment.down = {4}
    report = run()
    assert run.column("episodes/errors/user_down") == [3]
    assert report["counts"]["episodes/errors"] == 3
    assert report["counts"]["samples/unscored"] == 3
    assert report["counts"]["groups/dropped_too_few_scored"] == 1
    assert report["domains"].get("near", {"attempts": 0})["attempts"] % 3 == 0
    assert sum(domain["attempts"] for domain in report["domains"].values()) == 3
    rows = run.io.rollouts()[1]
    assert [row["advantage"] for row in rows if row["sample_id"] == "near/t4"] == [None] * 3


@pytest.mark.parametrize("behind", [0, 1])
def test_an_outage_ends_the_stage_with_nothing_trained_on_it_and_the_next_attempt_samples_anew(
    new, behind, straight
):
    run = new(environment={"max_error_share": 0.4}, async_steps=behind, save_freq=100)
    made: list[str] = []

    class Sick(Troubled):
        def episode(self, task: Any) -> CountingEpisode:
            made.append(task.id)
            self.down = set(range(5)) if len(made) > 12 else set()
            return super().episode(task)

    run.environment = Sick()
    with pytest.raises(
        EnvironmentOutage, match=r"6 of 6 episodes of a step: user_down \(6 times\)"
    ):
        run()
    assert run.io.checkpoint_steps() == [2]
    run.environment = Troubled()
    report = run()
    assert report["counts"]["episodes/errors"] == 0
    assert report["episodes"] == EPISODES
    if not behind:  # with older policies the lost batch comes from newer weights than it would have
        assert report == straight[1]
        assert run.outcome() == straight[2]


# ---------------------------------------------------------------- refused before anything is done


@pytest.mark.parametrize(
    ("environment", "grpo", "error", "says"),
    [
        ({}, {"max_token_length": 20}, ConfigurationError, "grpo.max_token_length"),
        ({"nl_assertions": "judge"}, {}, ValueError, "rank 0, and no other, has the judge"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sampled(
    new, environment, grpo, error, says
):
    run = new(environment=environment, **grpo)
    with pytest.raises(error, match=says):
        run()
    assert run.environment.made == 0
