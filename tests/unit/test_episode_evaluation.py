"""Evaluations of agents: numbers, errors, interruption, protocols and comparisons."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import EnvironmentOutage, Interrupted
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.types import PromptRow
from refiner_core.environments.protocol import EpisodeRecord
from refiner_core.evaluation.episodes import evaluate_episodes, failure_of
from refiner_core.evaluation.metrics import episode_metrics, load_samples
from refiner_core.evaluation.protocol import make_protocol, sampling_params
from refiner_core.models import tiny_tokenizer
from sweeps.checks import measures
from tests.support.playing import (
    Desk,
    Plan,
    Player,
    agent_config,
    by_attempt,
    seed_of,
    task_rows,
    world_seed,
    write_tasks,
)
from tests.support.stage_io import FolderStageIO

B0, B1, O0, O1 = (f"{d}/{d}-test-00{i}" for d in ("bookings", "orders") for i in (0, 1))
#: bookings: 3 and 1 of 4 attempts; orders: none and all.
PLAYED = {
    B0: ("expert", "expert", "nothing", "expert"),
    B1: ("words", "nothing", "expert", "flawed"),
    O0: ("flawed", "nothing", "words", "nothing"),
    O1: ("expert", "expert", "expert", "expert"),
}


class Bench:
    """Evaluates a player on the first two tasks of two domains."""

    def __init__(self, root: Path, config: RecipeConfig | None = None) -> None:
        self.root, self.config = root, config or agent_config()
        self.rows: list[PromptRow] = task_rows(self.config, _TOKENIZER, 2)
        self.data = write_tasks(root / "data", self.rows)

    def player(self, plan: Plan) -> Player:
        return Player(self.config, self.rows, plan)

    def failing(self, key: str, *places: tuple[str, int], deterministic: bool = True) -> Desk:
        seeds = frozenset(world_seed(self.config, key, task, i) for task, i in places)
        return Desk(self.config, seeds, deterministic=deterministic)

    def run(
        self,
        player: Player,
        *,
        desk: Desk | None = None,
        name: str = "out",
        io: FolderStageIO | None = None,
        config: RecipeConfig | None = None,
    ) -> dict[str, Any]:
        return evaluate_episodes(
            config or self.config,
            data_dir=self.data,
            data_digest="d" * 64,
            model_ref="builtin:tiny",
            model_name="grpo",
            output_dir=self.root / name,
            io=io or FolderStageIO(self.root / f"{name}-io"),
            generator=player,
            tokenizer=player.tokenizer,
            environment=desk or Desk(self.config),
        )


_TOKENIZER = tiny_tokenizer()


def numbers(results: dict[str, Any], decoding: str, part: str = "evaluations") -> dict[str, Any]:
    return {e["metric"]: e for e in results[part] if e["decoding"] == decoding}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def results(bench: Bench) -> dict[str, Any]:
    return bench.run(bench.player(by_attempt(PLAYED)))


# ---------------------------------------------------------------- numbers


def test_numbers_and_intervals_of_tasks_overall_and_by_domain(results: dict[str, Any]) -> None:
    sampled = numbers(results, "sampled")
    found = {m: (e["value"], e["n"]) for m, e in sampled.items()}
    assert found["pass@1_first"] == (0.5, 4)
    assert found["pass@1"] == ((0.75 + 0.25 + 0 + 1) / 4, 4)
    assert found["pass@4"] == (0.75, 4)
    assert found["pass^2"] == ((0.5 + 0 + 0 + 1) / 4, 4)
    assert found["pass^4"] == (0.25, 4)
    assert found["pass@1/bookings"] == (0.5, 2)
    assert found["pass@4/orders"] == (0.5, 2)
    assert found["success"] == (0.5, 4)
    assert found["episode_error"] == (0.0, 4)
    intervals = {m: e["interval"] for m, e in sampled.items()}
    assert {intervals[m] for m in ("pass@1_first", "pass@4", "pass^4")} == {"wilson"}
    assert intervals["pass@1"] == intervals["pass^2"] == "bootstrap over prompts"
    assert sampled["pass@1"]["low"] == sampled["pass^1"]["low"], "one number has one interval"
    first = sampled["pass@1_first"]
    assert (first["numerator"], first["denominator"]) == (2.0, 4), "tasks, not attempts"
    greedy = numbers(results, "greedy")
    assert greedy["pass@1"]["value"] == greedy["pass@1_first"]["value"] == 0.5
    assert greedy["pass@1"]["interval"] == "wilson"
    assert "pass@2" not in greedy, "greedy decoding makes one attempt at a task"


@pytest.mark.usefixtures("results")
def test_every_attempt_is_in_the_samples_with_its_episode(bench: Bench) -> None:
    rows = load_samples(bench.root / "out" / "samples-sampled.parquet")
    assert [(r["sample_id"], r["sample_index"]) for r in rows[:5]] == [
        *((B0, i) for i in range(4)),
        (B1, 0),
    ]
    assert rows[0]["pass@4"] == 1.0
    assert rows[1]["pass@4"] is None, "tasks count once"
    assert rows[0]["pass@4/orders"] is None
    assert [rows[4][k] for k in ("failure", "success", "reward")] == ["no_call", 0.0, 0.0]
    episode = json.loads(rows[0]["episode"])
    for turn in episode["turns"]:
        assert turn["text"] in rows[0]["response_text"]
    assert rows[0]["length_tokens"] == sum(t["end"] - t["start"] for t in episode["turns"])
    checks = json.loads(rows[0]["judgements"])
    assert checks
    assert all(check["score"] == 1.0 for check in checks)


# ---------------------------------------------------------------- errors of the infrastructure


def test_an_error_is_no_failure_and_removes_the_numbers_that_need_it(bench: Bench) -> None:
    desk = bench.failing("sampled", (B0, 0), *((O0, i) for i in range(4)))
    results = bench.run(bench.player(by_attempt(PLAYED)), desk=desk, name="errors")
    found = {m: (e["value"], e["n"]) for m, e in numbers(results, "sampled").items()}
    assert found["pass@1_first"] == (0.5, 2), "neither an error nor the second attempt"
    assert found["pass@1"] == ((2 / 3 + 1 / 4 + 1) / 3, 3), "a task without attempts is no 0"
    assert found["pass@4"] == (1.0, 2)
    assert found["pass@1/orders"] == (1.0, 1)
    assert found["episode_error"] == (5 / 16, 4)
    told = results["episodes"]["sampled"]
    assert told["domains"]["orders"]["errors"] == {"user_down": 4}
    assert told["tasks"][O0] == [0, 0]
    rows = load_samples(bench.root / "errors" / "samples-sampled.parquet")
    error = rows[0]
    assert error["status"] == "error"
    measured = {m for m in episode_metrics(4, ("bookings", "orders")) if error[m] is not None}
    own = {m for m in measured if not m.startswith("pass")}
    assert own == {"episode_error", "episode_error/bookings"}


@pytest.mark.parametrize("deterministic", [True, False])
def test_too_many_errors_stop_an_evaluation_and_are_tried_again(
    bench: Bench, deterministic: bool
) -> None:
    """No error of the outage counts later, not even one of a batch that was finished before."""
    config = replace_fields(bench.config, {"evaluate.batch_size": 8})
    name = f"outage-{deterministic}"
    io = FolderStageIO(bench.root / f"{name}-io")
    places = [(task, i) for task in (B0, B1, O0) for i in range(4)]
    broken = bench.failing("sampled", *places, deterministic=deterministic)
    player = bench.player(by_attempt(PLAYED))
    with pytest.raises(EnvironmentOutage, match=r"(9|12) of 16.*user_down.*does not answer"):
        bench.run(player, desk=broken, io=io, name=name, config=config)
    before = len(player.seeds)
    whole = Desk(bench.config, deterministic=deterministic)
    again = bench.run(player, desk=whole, io=io, name=name, config=config)
    assert numbers(again, "sampled")["episode_error"]["value"] == 0.0
    assert numbers(again, "sampled")["pass@4"]["value"] == 0.75
    greedy = {derive_seed(seed_of(config, "greedy", task, 0), "turn", 0) for task in PLAYED}
    assert greedy <= set(player.seeds[:before])
    assert not greedy & set(player.seeds[before:]), "finished episodes are not played again"


# ---------------------------------------------------------------- interruption


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_stop_at_any_batch_changes_no_number(bench: Bench, *, deterministic: bool) -> None:
    config = replace_fields(bench.config, {"evaluate.batch_size": 8})
    name = f"stops-{deterministic}"
    whole = bench.run(
        bench.player(by_attempt(PLAYED)),
        desk=Desk(config, deterministic=deterministic),
        name=f"{name}-whole",
        config=config,
    )
    io, stops = FolderStageIO(bench.root / f"{name}-io"), 0
    again = None
    while again is None:
        player = bench.player(by_attempt(PLAYED))
        player.stop_at = (4 * (stops + 1), Interrupted("stopped"))
        desk = Desk(config, deterministic=deterministic)
        try:
            again = bench.run(player, desk=desk, name=name, io=io, config=config)
        except Interrupted:
            stops += 1
    assert stops >= 2
    assert again == whole
    for file in ("samples-sampled.parquet", "samples-do_nothing.parquet"):
        one, other = (load_samples(bench.root / n / file) for n in (name, f"{name}-whole"))
        assert _without_times(one) == _without_times(other)


def _without_times(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        episode = json.loads(row["episode"])
        for turn in episode["turns"]:
            turn["seconds"] = 0.0
        found.append({**row, "episode": episode})
    return found


def test_the_reward_alone_decides_a_success() -> None:
    """As in training and rejection sampling."""
    record = EpisodeRecord("a", "d", 1, "finished", "done", (), (), reward=1.0, failure="gave_up")
    assert record.success
    assert failure_of(record) == ""
    assert failure_of(replace(record, reward=0.5)) == "gave_up"
    assert failure_of(replace(record, reward=0.5, failure=None)) == "incomplete"
    assert failure_of(replace(record, reward=0.0, ended="no_call")) == "no_call"


# ---------------------------------------------------------------- protocols


def test_the_users_own_rules_are_part_of_the_protocol(bench: Bench, tmp_path: Path) -> None:
    """Also without a new version: numbers under other rules are not compared."""
    file = tmp_path / "shop.py"
    config = replace_fields(bench.config, {"environment.name": f"{file}:Shop"})
    found = []
    for text in ("RULE = 1\n", "RULE = 2\n"):
        file.write_text(text)
        found.append(protocol_of(config, bench.rows))
    assert found[0].fingerprint != found[1].fingerprint
    assert str(tmp_path) not in json.dumps([one.as_json() for one in found])


def protocol_of(config: RecipeConfig, rows: Sequence[PromptRow]) -> Any:
    return make_protocol(config, rows, "sampled", "d" * 64, environment=Desk(config))


@pytest.mark.parametrize(
    ("change", "other"),
    [
        ({"environment.max_turns": 9}, True),
        ({"grpo.max_token_length": 4096}, True),
        ({"evaluate.top_k": 20}, True),
        ({"evaluate.generation_backend": "vllm"}, True),
        ({"environment.domains": ["bookings"]}, True),
        ({"reward.verification_reward": 3.0}, False),
        ({"environment.workers": 3}, False),
        ({"environment.shaping.alpha": 0.9}, False),
    ],
)
def test_settings_that_change_numbers_change_the_protocol(
    bench: Bench, change: dict[str, Any], other: bool
) -> None:
    changed = replace_fields(bench.config, change)
    one, two = (protocol_of(c, bench.rows) for c in (bench.config, changed))
    assert (one.fingerprint != two.fingerprint) is other
    assert one.environment["version"] == "1"
    assert one.name.startswith("held-out/sampled/desk@1-")


def test_protocols_of_answers_keep_their_published_fingerprints() -> None:
    """Fingerprints that stand in published cards, recorded before there were agents, and before a
    claim counted once: no number of today has one of them."""
    rows = [PromptRow("a", "q", "p", (1, 2, 3), "[]")]
    config = replace_fields(RecipeConfig(), {"judge.prompt": "v1"})
    now = [make_protocol(config, rows, d, "d" * 64) for d in ("greedy", "sampled")]
    greedy, sampled = (replace(protocol, version=1) for protocol in now)
    assert not {p.fingerprint for p in now} & {greedy.fingerprint, sampled.fingerprint}
    assert (greedy.fingerprint, sampled.fingerprint) == ("58dda3a4ddfa", "8c1713e69950")
    assert greedy.with_reward(config).fingerprint == "a03fcbd9bbef"
    assert "environment" not in sampled.as_json()
    assert sampling_params(config, "sampled").top_k == 0


# ---------------------------------------------------------------- reports


def test_a_sweep_may_vary_training_and_not_measurement() -> None:
    config = agent_config()
    part = {f: measures(f, "pass@1", config) for f in YARDSTICK}
    assert part == YARDSTICK
    assert measures("environment.shaping.weights", "partial", config)
    apart = agent_config(evaluate__user__model="another")
    assert not measures("environment.user.model", "pass@1", apart)


YARDSTICK = {
    "environment.max_turns": True,
    "environment.user.model": True,
    "evaluate.user.temperature": True,
    "evaluate.top_k": True,
    "environment.shaping.alpha": False,
    "environment.shaping.weights": False,
    "environment.unparsable": False,
    "environment.demonstrations": False,
    "judge.model": False,
    "grpo.credit": False,
}
