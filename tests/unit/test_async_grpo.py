"""GRPO whose next batches are sampled while the last one trains: the age of weights, and resume."""

import functools
import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from refiner_core.contract.errors import (
    HealthStop,
    Interrupted,
    JudgeOutage,
    KilledError,
    WorkspaceError,
)
from refiner_core.contract.sections.training import HealthConfig
from refiner_core.contract.types import RewardResult
from refiner_core.generation.transformers_backend import TransformersGenerator
from refiner_core.training.engines.plain import PlainEngine
from refiner_core.training.rollouts.pipeline import IN_FLIGHT
from tests.support.tiny_training import (
    TrainRun,
    count_low_words,
    save_data,
    save_tiny_model,
    tiny_model,
    tiny_tokenizer,
)

STEPS = 5


def served(run: TrainRun, servers: Any) -> dict[str, Any]:
    """The run with what the servers sample."""
    run.open_servers = lambda engine: nullcontext(servers)
    return run(generation_backend="vllm")


def responses(run: TrainRun) -> list[list[list[int]]]:
    """Sampled tokens by step."""
    return [[r["response_ids"] for r in rows] for rows in run.io.rollouts().values()]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    save_data(root / "data")
    save_tiny_model(root / "model")
    return root


@pytest.fixture
def new(inputs, tmp_path):
    def make(name: str = "run", **grpo: Any) -> TrainRun:
        return TrainRun(inputs, tmp_path / name, grpo={"save_freq": 1, **grpo})

    return make


@pytest.fixture(scope="module")
def straight(inputs, tmp_path_factory):
    """By async_steps: the run, its report and its outcome."""

    @functools.cache
    def get(behind: int) -> tuple[TrainRun, dict[str, Any], dict[str, Any]]:
        grpo = {"save_freq": 1, "async_steps": behind}
        run = TrainRun(inputs, tmp_path_factory.mktemp(f"straight{behind}"), grpo=grpo)
        return run, run(), run.outcome()

    return get


# ---------------------------------------------------------------- which weights


@pytest.mark.parametrize("behind", [1, 2])
def test_a_batch_is_sampled_by_weights_of_exactly_the_age_that_the_recipe_says(
    straight, new, behind
):
    run = straight(behind)[0]
    assert run.column("val/policy_age") == [min(t, behind) for t in range(STEPS)]
    assert run.column("samples/dropped_stale") == [0] * STEPS
    frozen = new(learning_rate=0.0, async_steps=behind)
    frozen()
    same = [a == b for a, b in zip(responses(run), responses(frozen), strict=True)]
    # The first 1 + k batches have the initial weights; then none has, since every step moves them.
    assert same == [t <= behind for t in range(STEPS)]
    newest = straight(0)[0]
    assert newest.column("val/policy_age") == [0] * STEPS
    assert responses(newest)[0] == responses(run)[0]
    assert responses(newest)[1] != responses(run)[1]
    gaps = run.column("val/sampler_logprob_gap")
    assert gaps[0] < 1e-5 < 1e-3 < gaps[1]


@pytest.mark.parametrize(
    ("owner", "name"), [(TransformersGenerator, "generate"), (PlainEngine, "step")]
)
def test_results_do_not_depend_on_which_side_is_faster(straight, new, monkeypatch, owner, name):
    plain = getattr(owner, name)

    def slowly(*args: Any, **named: Any) -> Any:
        time.sleep(0.1)
        return plain(*args, **named)

    monkeypatch.setattr(owner, name, slowly)
    run = new(async_steps=1)
    assert run() == straight(1)[1]
    assert run.outcome() == straight(1)[2]


def test_the_next_batch_is_sampled_while_the_last_one_trains(new, monkeypatch):
    """The update of step 1 does not return before the sampling of batch 2 has begun, and the other
    way round: only at once can both get on."""
    import threading

    trains, samples = threading.Event(), threading.Event()
    generate, update = TransformersGenerator.generate, PlainEngine.step
    calls = []

    def generating(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            samples.set()
            assert trains.wait(30), "the update waited for the samples"
        return generate(self, *args)

    def training(self: Any, factor: float) -> float:
        trains.set()
        assert samples.wait(30), "the samples waited for the update"
        return update(self, factor)

    monkeypatch.setattr(TransformersGenerator, "generate", generating)
    monkeypatch.setattr(PlainEngine, "step", training)
    new(async_steps=1, num_training_steps=2)()


class ModelServers(TransformersGenerator):
    """Servers as training sees them, over a model in this process; weights go there by a sync."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, tiny_tokenizer())
        self.versions: list[str] = []

    def sync(self, hand_over: Any, version: str) -> None:
        self.versions.append(version)
        copies = dict(self.model.named_parameters())

        def save(_: Any, weights: Any) -> None:
            with torch.no_grad():
                for name, weight in weights:
                    copies[name].copy_(weight)

        hand_over(lambda _: [3, 4], save)


@pytest.mark.parametrize("behind", [0, 1])
def test_servers_give_the_run_of_the_model_beside_the_trainer(straight, new, behind):
    servers, run = ModelServers(tiny_model(5)), new(async_steps=behind)
    assert served(run, servers) == straight(behind)[1]
    assert run.outcome() == straight(behind)[2]
    # Each time before something is sampled: every version once, and for nothing that is not needed.
    expected = {0: [0, 1, 2, 3, 4], 1: [0, 1, 2, 3]}[behind]
    assert [int(version) for version in servers.versions] == expected


def test_weights_that_do_not_reach_the_servers_end_the_stage(new):
    servers, run = ModelServers(tiny_model(5)), new(async_steps=1)

    def lost(hand_over: Any, version: str) -> None:
        raise KilledError("the server is gone")

    servers.sync = lost
    with pytest.raises(KilledError, match="the server is gone"):
        served(run, servers)


# ---------------------------------------------------------------- interrupted anywhere


class Fault(Exception):
    """The node went away."""


def break_generating(run: TrainRun, patch: pytest.MonkeyPatch, nth: int) -> None:
    """In the middle of this batch."""
    generate, calls = TransformersGenerator.generate, []

    def broken(self: Any, requests: Any, params: Any, on_completion: Any = None) -> Any:
        calls.append(1)

        def finished(i: int, completion: Any) -> None:
            if len(calls) == nth and i == len(requests) // 2:
                raise Fault
            on_completion(i, completion)

        return generate(self, requests, params, finished)

    patch.setattr(TransformersGenerator, "generate", broken)


def failing(plain: Any, nth: int, error: Exception) -> Any:
    """A function whose nth call fails."""
    calls: list[int] = []

    def broken(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise error
        return plain(*args)

    return broken


def break_judging(run: TrainRun, patch: pytest.MonkeyPatch, nth: int) -> None:
    patch.setattr(run, "rewards", failing(count_low_words, nth, Fault()))


def break_update(run: TrainRun, patch: pytest.MonkeyPatch, nth: int) -> None:
    """Between backward and the optimiser step."""
    patch.setattr(PlainEngine, "step", failing(PlainEngine.step, nth, Fault()))


def break_saving(run: TrainRun, patch: pytest.MonkeyPatch, nth: int) -> None:
    patch.setattr(run.io, "fail_save_at", max([0, *run.io.checkpoint_steps()]) + nth)


@pytest.mark.parametrize(
    ("breaking", "behind"),
    [
        *((break_generating, behind) for behind in (1, 2)),
        *((break_judging, 2), (break_update, 2), (break_saving, 1)),
    ],
)
@pytest.mark.slow
def test_a_fault_at_every_step_changes_no_result(straight, new, behind, breaking):
    """Every process but the last gets one step further than the one before it, or none."""
    run, broken = new(async_steps=behind), 0
    # A step is saved once the batches after it are there: one more for each that is in flight.
    first = range(1, 2 if breaking in (break_update, break_saving) else behind + 3)
    for nth in (*first, *[2] * (STEPS + 1)):
        with pytest.MonkeyPatch.context() as patch:
            breaking(run, patch, nth)
            try:
                report = run()
            except (Fault, OSError):
                broken += 1
                continue
            break
    assert broken >= STEPS - 1
    assert report == straight(behind)[1]
    assert run.outcome() == straight(behind)[2]


@pytest.mark.parametrize(("behind", "async_save"), [(1, True), (2, False), (2, True)])
@pytest.mark.slow
def test_stopped_after_every_step_it_resumes_bitwise(straight, new, behind, async_save):
    run = new(async_steps=behind, save_freq=100, async_save=async_save)
    assert run.stopped_after(*range(1, STEPS)) == straight(behind)[1]
    assert run.outcome() == straight(behind)[2]


def test_a_stop_in_the_middle_of_a_step_keeps_the_steps_before(straight, new, monkeypatch):
    """Asked for while step 3 waits for its rewards."""
    run, asked = new(async_steps=1, save_freq=100), []

    def rewards(*args: Any) -> list[RewardResult]:
        asked.append(1)
        return count_low_words(*args)

    run.rewards = rewards
    monkeypatch.setattr(run.io, "should_stop", lambda: len(asked) == 3)
    with pytest.raises(Interrupted, match="after step 2"):
        run()
    assert run.io.checkpoint_steps() == [2]
    asked.extend([1] * 10)
    assert run() == straight(1)[1]
    assert run.outcome() == straight(1)[2]


def test_a_judge_outage_costs_its_step_alone_and_no_answer_is_asked_again(new):
    """Its answers differ from call to call, so that a repeated question would show."""
    calls = []

    def moody(items: Any, *args: Any) -> list[RewardResult]:
        calls.append([item.prompt.sample_id for item in items])
        if len(calls) == 3:
            raise JudgeOutage("nobody is there")
        n = len(calls) - (len(calls) > 3)
        results = count_low_words(items, *args)
        return [
            RewardResult(r.status, r.total * (1 + n / 7), {"low": r.total}, r.judgements)
            for r in results
        ]

    run = new(async_steps=2, save_freq=100)
    run.rewards = moody
    with pytest.raises(JudgeOutage):
        run()
    assert run.io.checkpoint_steps() == [2]
    kept = json.loads((run.io.root / "checkpoints/2" / IN_FLIGHT).read_bytes())
    assert [f["step"] for f in kept["flights"]] == [3, 4]
    assert [f["version"] for f in kept["flights"]] == [0, 1]
    run()
    # Five batches were judged once each, and one of them was asked about in vain before.
    assert len(calls) == STEPS + 1
    assert calls[2] == calls[3]


# ---------------------------------------------------------------- too old


def test_rollouts_of_a_checkpoint_are_dropped_if_too_old_and_named_if_damaged(new):
    run = new(async_steps=2)
    run.io.stop_at = 3
    with pytest.raises(Interrupted):
        run()
    run.io.stop_at = None
    in_flight = run.io.root / "checkpoints/3" / IN_FLIGHT
    sound = in_flight.read_bytes()
    in_flight.write_bytes(b'{"format": 1, "flights": [{}]}')
    with pytest.raises(WorkspaceError, match=IN_FLIGHT):
        run()
    in_flight.write_bytes(sound)
    report = run(async_steps=1)
    # Batches 4 and 5 were sampled by the weights of steps 1 and 2.
    assert run.column("samples/dropped_stale") == [0, 0, 0, 24, 0]
    assert run.column("val/policy_age") == [0, 1, 2, 0, 1]
    assert report["counts"]["samples/dropped_stale"] == 24
    assert report["episodes"] == 12 * STEPS


# ---------------------------------------------------------------- active sampling


def flat_for(flat: set[str]):
    """Rewards without spread for these prompts."""

    def rewards(items: Any, *args: Any) -> list[RewardResult]:
        return [
            RewardResult("scored", 1.0, {"low": 1.0}) if item.prompt.sample_id in flat else result
            for item, result in zip(items, count_low_words(items, *args), strict=True)
        ]

    return rewards


@pytest.mark.parametrize("behind", [0, 1])
def test_a_step_is_filled_up_until_enough_groups_have_spread(new, behind):
    run = new(active_sampling=True, async_steps=behind)
    run.rewards = flat_for({"prompt-0", "prompt-1"})
    report = run()
    assert run.column("groups/kept") == [3] * STEPS
    assert max(run.column("groups/sampling_rounds")) > 1
    assert report["counts"]["groups/dropped_zero_std"] > 0
    for step, rows in run.io.rollouts().items():
        names = [row["sample_id"] for row in rows]
        assert {names.count(name) for name in names} == {4}, f"a prompt twice in step {step}"
        assert {r["advantage"] for r in rows if r["sample_id"] in ("prompt-0", "prompt-1")} <= {0}
    assert report["episodes"] == sum(len(rows) for rows in run.io.rollouts().values())


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.slow
def test_filling_up_resumes_bitwise(new, behind):
    def active(name: str) -> TrainRun:
        run = new(name, active_sampling=True, async_steps=behind, save_freq=2)
        run.rewards = flat_for({"prompt-2", "prompt-3", "prompt-6"})
        return run

    whole, cut = active("whole"), active("cut")
    report = whole()
    assert max(whole.column("groups/sampling_rounds")) > 1
    assert cut.stopped_after(1, 2, 4) == report
    assert cut.outcome() == whole.outcome()


@pytest.mark.slow
def test_an_outage_while_filling_up_an_older_policys_batch_goes_back_to_the_last_save(new):
    """Its next round needs weights that no checkpoint has."""
    flat = flat_for({"prompt-2", "prompt-3", "prompt-6"})
    make = functools.partial(new, active_sampling=True, async_steps=1, save_freq=2)
    whole, cut = make("whole"), make("cut")
    whole.rewards, cut.rewards = flat, failing(flat, 6, JudgeOutage("nobody is there"))
    report = whole()
    with pytest.raises(JudgeOutage):
        cut()
    assert cut() == report
    assert cut.outcome() == whole.outcome()


# ---------------------------------------------------------------- health


def flat_third():
    """Rewards without spread for the third batch that is judged."""
    calls = []

    def rewards(items: Any, *args: Any) -> list[RewardResult]:
        calls.append(1)
        if len(calls) == 3:
            return [RewardResult("scored", 1.0, {"low": 1.0}) for _ in items]
        return count_low_words(items, *args)

    return rewards


def test_a_health_check_that_stops_keeps_the_state_before_the_step(new):
    """Under another policy the run continues from there, with the same rewards."""
    strict = HealthConfig(zero_reward_variance="stop", patience=1)
    settings = {"async_steps": 1, "save_freq": 100, "health": HealthConfig(patience=1)}
    run, whole = (new(name, **settings) for name in ("cut", "whole"))
    run.rewards, whole.rewards = flat_third(), flat_third()
    with pytest.raises(HealthStop, match="no group of samples has any spread"):
        run(health=strict)
    assert run.io.checkpoint_steps() == [2]
    assert run() == whole()
    assert run.outcome() == whole.outcome()


def test_a_loss_that_is_not_finite_can_be_skipped(new):
    def rewards(items: Any, *args: Any) -> list[RewardResult]:
        results = count_low_words(items, *args)
        return [RewardResult("scored", math.nan, {}), *results[1:]]

    run = new(health=HealthConfig(not_finite="skip"), num_training_steps=2)
    run.rewards = rewards
    run()
    assert run.column("optimizer_steps") == [0, 0]
    assert run.column("health/not_finite") == [1, 1]
    assert "loss/total_avg" not in run.io.metrics()[0]
