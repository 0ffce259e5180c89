"""Evaluations of agents: what is counted, what is left out, what is comparable, what survives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.reporting.samples import SamplesReader
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import (
    EnvironmentOutage,
    Interrupted,
)
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.types import PromptRow
from refiner_core.environments.protocol import EpisodeRecord
from refiner_core.evaluation.episodes import evaluate_episodes, failure_of
from refiner_core.evaluation.metrics import (
    episode_metrics,
    load_samples,
)
from refiner_core.evaluation.protocol import make_protocol, sampling_params
from refiner_core.evaluation.results import compare_results
from refiner_core.evaluation.statistics import paired_difference_over_seeds
from refiner_core.report.sweep.comparing import make_report
from refiner_core.report.sweep.rendering import markdown, page, views_of
from sweeps.checks import measures
from tests.support.made_evidence import MadeSweep
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


def _tokenizer() -> Any:
    from refiner_core.models import tiny_tokenizer

    return tiny_tokenizer()


_TOKENIZER = _tokenizer()


def numbers(results: dict[str, Any], decoding: str, part: str = "evaluations") -> dict[str, Any]:
    return {e["metric"]: e for e in results[part] if e["decoding"] == decoding}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def results(bench: Bench) -> dict[str, Any]:
    return bench.run(bench.player(by_attempt(PLAYED)))


@pytest.fixture(scope="module")
def improved(bench: Bench) -> dict[str, Any]:
    return bench.run(bench.player(by_attempt({**PLAYED, O0: ("expert",) * 4})), name="better")


# ---------------------------------------------------------------- numbers


def test_numbers_of_tasks_overall_and_by_domain(results: dict[str, Any]) -> None:
    found = {m: (e["value"], e["n"]) for m, e in numbers(results, "sampled").items()}
    assert found["pass@1_first"] == (0.5, 4)
    assert found["pass@1"] == ((0.75 + 0.25 + 0 + 1) / 4, 4)
    assert found["pass@4"] == (0.75, 4)
    assert found["pass^2"] == ((0.5 + 0 + 0 + 1) / 4, 4)
    assert found["pass^4"] == (0.25, 4)
    assert found["pass@1/bookings"] == (0.5, 2)
    assert found["pass@4/orders"] == (0.5, 2)
    assert found["success"] == (0.5, 4)
    assert found["episode_error"] == (0.0, 4)


def test_a_yes_or_no_of_each_task_has_wilsons_interval_and_a_share_a_bootstrap(
    results: dict[str, Any],
) -> None:
    found = {m: e["interval"] for m, e in numbers(results, "sampled").items()}
    assert {found[m] for m in ("pass@1_first", "pass@4", "pass^4")} == {"wilson"}
    assert found["pass@1"] == found["pass^2"] == "bootstrap over prompts"
    same = [numbers(results, "sampled")[m] for m in ("pass@1", "pass^1")]
    assert same[0]["low"] == same[1]["low"], "one number has one interval"
    first = numbers(results, "sampled")["pass@1_first"]
    assert (first["numerator"], first["denominator"]) == (2.0, 4), "tasks, not attempts"


def test_greedy_makes_one_attempt_at_a_task(results: dict[str, Any]) -> None:
    found = numbers(results, "greedy")
    assert found["pass@1"]["value"] == found["pass@1_first"]["value"] == 0.5
    assert found["pass@1"]["interval"] == "wilson"
    assert "pass@2" not in found


@pytest.mark.usefixtures("results")
def test_every_attempt_is_in_the_samples_with_all_that_was_said(bench: Bench) -> None:
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


def test_an_error_is_no_failure_and_takes_the_numbers_that_need_it(bench: Bench) -> None:
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


def test_too_many_errors_stop_it_and_are_tried_again(bench: Bench) -> None:
    io = FolderStageIO(bench.root / "outage-io")
    tasks = (B0, B1, O0, O1)
    places = [(task, i) for task in tasks[:3] for i in range(3)]
    broken = bench.failing("sampled", *places, deterministic=False)
    player = bench.player(by_attempt(PLAYED))
    with pytest.raises(EnvironmentOutage, match=r"9 of 16.*user_down.*does not answer"):
        bench.run(player, desk=broken, io=io, name="outage")
    before = len(player.seeds)
    whole = Desk(bench.config, deterministic=False)
    results = bench.run(player, desk=whole, io=io, name="outage")
    assert numbers(results, "sampled")["episode_error"]["value"] == 0.0
    assert numbers(results, "sampled")["pass@4"]["value"] == 0.75
    again = set(player.seeds[before:])
    greedy = {derive_seed(seed_of(bench.config, "greedy", task, 0), "turn", 0) for task in tasks}
    assert greedy <= set(player.seeds[:before])
    assert not greedy & again, "what had finished is not made again"


def test_after_an_outage_no_error_of_it_counts_against_the_next_try(bench: Bench) -> None:
    """Not even one of a batch that was finished before there were too many."""
    config = replace_fields(bench.config, {"evaluate.batch_size": 8})
    io = FolderStageIO(bench.root / "flaky-io")
    places = [(task, i) for task in (B0, B1, O0) for i in range(4)]
    player = bench.player(by_attempt(PLAYED))
    broken = bench.failing("sampled", *places)
    with pytest.raises(EnvironmentOutage, match="9 of 16"):
        bench.run(player, desk=broken, io=io, name="flaky", config=config)
    before = len(player.seeds)
    again = bench.run(player, io=io, name="flaky", config=config)
    assert numbers(again, "sampled")["episode_error"]["value"] == 0.0
    assert numbers(again, "sampled")["pass@4"]["value"] == 0.75
    greedy = {derive_seed(seed_of(config, "greedy", task, 0), "turn", 0) for task in PLAYED}
    assert not greedy & set(player.seeds[before:]), "what had no error is not made again"


# ---------------------------------------------------------------- what survives


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
    io, batch = FolderStageIO(bench.root / f"{name}-io"), 0
    stops = 0
    while True:
        player = bench.player(by_attempt(PLAYED))
        batch += 4
        player.stop_at = (batch, Interrupted("the plug was pulled"))
        desk = Desk(config, deterministic=deterministic)
        try:
            again = bench.run(player, desk=desk, name=name, io=io, config=config)
        except Interrupted:
            stops += 1
            continue
        break
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


def test_the_reward_decides_what_a_success_is() -> None:
    """As in training and rejection sampling, whatever reason an environment gives beside it."""
    record = EpisodeRecord("a", "d", 1, "finished", "done", (), (), reward=1.0, failure="gave_up")
    assert record.success
    assert failure_of(record) == ""
    assert failure_of(replace(record, reward=0.5)) == "gave_up"
    assert failure_of(replace(record, reward=0.5, failure=None)) == "incomplete"
    assert failure_of(replace(record, reward=0.0, ended="no_call")) == "no_call"


# ---------------------------------------------------------------- protocols


def test_rules_of_ones_own_are_part_of_the_protocol(bench: Bench, tmp_path: Path) -> None:
    """Also where their version was forgotten: numbers under other rules are not compared."""
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
    "change",
    [
        {"environment.max_turns": 9},
        {"environment.repairs": 0},
        {"grpo.max_token_length": 4096},
        {"grpo.response_length": 99},
        {"evaluate.top_k": 20},
        {"evaluate.temperature": 0.8},
        {"evaluate.num_samples": 8},
        {"environment.domains": ["bookings"]},
    ],
)
def test_what_changes_numbers_changes_the_protocol(bench: Bench, change: dict[str, Any]) -> None:
    changed = replace_fields(bench.config, change)
    one, other = (protocol_of(c, bench.rows) for c in (bench.config, changed))
    assert one.fingerprint != other.fingerprint
    assert one.environment["version"] == "1"
    assert one.name.startswith("held-out/sampled/desk@1-")


@pytest.mark.parametrize(
    "change",
    [
        {"judge.model": "other"},
        {"reward.verification_reward": 3.0},
        {"environment.unparsable": "exclude"},
        {"environment.workers": 3},
        {"environment.shaping.alpha": 0.9},
        {"evaluate.batch_size": 3},
    ],
)
def test_what_does_not_leaves_it(bench: Bench, change: dict[str, Any]) -> None:
    changed = replace_fields(bench.config, change)
    one, other = (protocol_of(c, bench.rows) for c in (bench.config, changed))
    assert one.fingerprint == other.fingerprint


def test_protocols_of_answers_are_what_they_were() -> None:
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


# ---------------------------------------------------------------- comparisons


@pytest.mark.usefixtures("results", "improved")
def test_two_models_are_compared_task_by_task_and_within_a_domain(bench: Bench) -> None:
    found = {
        (r["decoding"], r["metric"]): r
        for r in compare_results([bench.root / "better"], [bench.root / "out"])
    }
    assert found["sampled", "pass@4"]["difference"] == 0.25
    by_domain = found["sampled", "pass@4/orders"]
    assert (by_domain["difference"], by_domain["n"], by_domain["excluded"]) == (0.5, 2, 0)


def test_tasks_of_other_domains_are_not_left_out_of_a_domains_number() -> None:
    rows = [{"sample_id": f"{d}/{i}", "pass@4/a": 1.0 if d == "a" else None}
            for d in "ab" for i in range(3)]  # fmt: skip
    found = paired_difference_over_seeds([rows], [rows], "pass@4/a")
    assert (found.n, found.excluded) == (3, 0)


# ---------------------------------------------------------------- what reads them


def test_arms_of_agents_are_compared_by_domain_with_their_failures(
    bench: Bench, results: dict[str, Any], improved: dict[str, Any]
) -> None:
    made = MadeSweep(("before", "after"), seeds=(1,))
    told = {}
    for arm, found, folder in (("before", results, "out"), ("after", improved, "better")):
        means = SamplesReader().means(bench.root / folder / "samples-sampled.parquet")
        values = dict(zip(means.metrics, means.values, strict=True))
        made.add(arm, 1, values, prompts=means.prompts, protocol=AGENT)
        told[f"evaluate-grpo-{arm}-1"] = found["episodes"]["sampled"]
    made.evaluations = {
        stage: tuple(replace(m, episodes=told[stage]) for m in measured)
        for stage, measured in made.evaluations.items()
    }
    report = make_report(made.evidence())
    assert report.primary is not None
    assert report.primary.key.metric == "pass@1"
    assert report.primary.key.judge == "desk 1, user: scripted"
    by_metric = {c.key.metric: c for c in report.comparisons}
    after = next(n for n in by_metric["pass@4/orders"].numbers if n.arm == "after")
    assert (after.difference, after.n, after.excluded) == (0.5, 2, 0)
    assert by_metric["failure/no_call"].higher_is_better is False
    assert {f["sample_id"] for f in report.flips} == {O0}
    assert list(views_of(report))[:3] == ["summary", "arms", "attempts"]
    (orders,) = (r for r in report.attempts if (r["arm"], r["domain"]) == ("before", "orders"))
    assert (orders["asked"], orders["passed"], sum(orders["failures"].values())) == (8, 4, 4)
    assert "1 seed × 4 tasks" in page(report)
    assert "| after |" in markdown(report)


def test_arms_that_change_the_environment_change_their_yardstick() -> None:
    """A sweep may vary how an agent is trained, not with whom it is then measured."""
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
AGENT = {
    "split": "held-out",
    "decoding": "sampled",
    "judge": {},
    "rubrics": {},
    "reward": None,
    "environment": {"name": "desk", "version": "1", "user": "scripted"},
}
