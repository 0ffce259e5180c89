"""Parts of a run's report that need no run: points, prompts, rewards, markup and hidden secrets."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.reporting.run.report import changed_settings, masked_overrides
from flows.reporting.run.results import choose, points_of, text_in_evaluation, text_in_training
from flows.reporting.samples import SamplesReader
from infra.host.secrets import HIDDEN, without_secrets
from infra.store.traces import MetricsLine, read_metrics
from refiner_core.answers import parse_answer
from refiner_core.contract.config import PenaltiesConfig, RecipeConfig, RewardConfig
from refiner_core.contract.records import to_json
from refiner_core.report.printing import plain
from refiner_core.report.transcripts import answer_markup, evidence_of
from refiner_core.rewards.combine import total_reward
from refiner_core.rewards.course import prices_of

REWARD = RewardConfig()


# ---------------------------------------------------------------- curves


def test_a_long_curve_keeps_its_ends_its_spikes_and_its_gaps() -> None:
    values: list[float | None] = [1.0] * 10_000
    values[4321], values[6789], values[7777] = 50.0, -3.0, None
    lines = [MetricsLine(step, {"scores": value}) for step, value in enumerate(values)]
    steps, shown = points_of(lines)["scores"]
    assert len(steps) <= 402
    assert (steps[0], steps[-1]) == (0, 9_999)
    found = dict(zip(steps, shown, strict=True))
    assert (found[4321], found[6789], found[7777]) == (50.0, -3.0, None)


def test_a_metric_of_every_step_has_gaps_and_one_of_few_steps_has_none() -> None:
    lines = [
        MetricsLine(step, {"scores": None if step == 3 else float(step)})
        for step in range(1, 11)
        if step != 5
    ]
    lines += [MetricsLine(step, {"loss/validation": 1.0}) for step in (5, 10)]
    found = points_of(lines)
    assert found["scores"][0] == tuple(range(1, 11))
    assert [s for s, v in zip(*found["scores"], strict=True) if v is None] == [3, 5]
    assert found["loss/validation"] == ((5, 10), (1.0, 1.0))


# ---------------------------------------------------------------- examples


def test_no_prompt_is_shown_twice_and_no_change_is_neither_better_nor_worse() -> None:
    changes = {f"p{i}": c for i, c in enumerate([0.0, 3.0, -2.0, 0.0, 1.0, 0.1, 0.0])}
    assert list(choose(changes).items()) == [
        ("p1", "improved most"),
        ("p4", "improved most"),
        ("p5", "improved most"),
        ("p2", "got worse most"),
        ("p0", "typical"),
        ("p3", "typical"),
    ]
    assert choose({}) == {}


# ---------------------------------------------------------------- what was said

COMPONENTS = {"rubric": 0.75, "citation": 0.5, "format_bonus": 0.5, "no_rubrics": 0.0,
              "penalty_copied": 0.9}  # fmt: skip


def rollout(reward: RewardConfig, **changes: Any) -> dict[str, Any]:
    components = {**COMPONENTS, **changes}
    total = total_reward(components, reward, stopped=True)
    return {
        **{"step": 3, "sample_id": "a", "sample_index": 0, "response_text": "<answer/>"},
        **{"finish_reason": "stop", "status": "scored", "reward": total, "advantage": -0.5},
        "judgements": json.dumps([{"kind": "rubric", "score": 1.0, "status": "scored"}]),
        **{f"reward/{name}": value for name, value in components.items()},
    }


@pytest.mark.parametrize(
    "reward",
    [
        REWARD,
        RewardConfig(combination="additive", paper_citation_weight=0.3),
        RewardConfig(apply_paper_citation_reward=False),
        RewardConfig(gate_judge_score_with_format_bonus=True),
        RewardConfig(penalties=PenaltiesConfig(copied=0.1)),
        RewardConfig(penalties=PenaltiesConfig(copied=1.0)),
    ],
)
@pytest.mark.parametrize("no_rubrics", [0.0, 1.0])
def test_the_parts_of_a_reward_add_up_to_it(reward: RewardConfig, no_rubrics: float) -> None:
    row = rollout(reward, no_rubrics=no_rubrics)
    said = text_in_training(row, reward)
    assert sum(part["share"] for part in said["parts"]) == pytest.approx(row["reward"])
    prices = prices_of(reward.penalties)
    assert {part["name"] for part in said["parts"]} == {"rubric", "citation", *prices}
    assert said["metrics"]["advantage"] == -0.5
    assert said["model"] == "step 3"


EPISODE = {
    "task_id": "orders/1",
    "status": "finished",
    "ended": "done",
    "first_messages": [["user", "hello"]],
    "turns": [{"text": "x" * 9_000, "status": "ok", "messages": [["tool", "late"]]}],
    "checks": [],
    "failure": "incomplete",
}


def test_long_texts_of_an_episode_are_cut() -> None:
    row = {
        **{"step": 1, "sample_id": "orders/1", "sample_index": 0, "response_text": "x"},
        **{"finish_reason": "stop", "status": "scored", "reward": 0.35, "judgements": []},
        **{"reward/reward": 0.25, "reward/partial": 0.4, "reward/alpha": 0.25, "reward/turns": 1.0},
        "episode": json.dumps(EPISODE),
    }
    said = text_in_training(row, REWARD)
    assert (said["text"], said["failed"]) == ("", "incomplete")
    assert [(p["name"], p["share"]) for p in said["parts"]] == [("reward", 0.25), ("partial", 0.1)]
    assert len(said["episode"]["turns"][0]["text"]) < 4_100
    assert said["metrics"]["turns"] == 1.0


def test_an_episode_with_a_user_error_has_no_reward() -> None:
    broken = {**EPISODE, "status": "error", "failure": None}
    broken |= {"error_kind": "user_down", "error": "The user does not answer."}
    row = {
        **{"sample_id": "orders/1", "sample_index": 0, "response_text": "", "status": "error"},
        **{"finish_reason": "stop", "reward": None, "success": None, "episode_error": 1.0},
        **{"judgements": "[]", "episode": json.dumps(broken), "failure": ""},
    }
    said = text_in_evaluation(row, "grpo", REWARD)
    assert (said["reward"], said["parts"]) == (None, ())
    assert said["failed"] == "user_down: The user does not answer."
    assert said["metrics"] == {"episode_error": 1.0}


# ---------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pass@host:8000/v1", "http://host:8000/v1"),
        ("API_KEY=abc123", f"API_KEY={HIDDEN}"),
        ("train.py --hf-token abc --steps 3", f"train.py --hf-token {HIDDEN} --steps 3"),
        ("password: abc", f"password: {HIDDEN}"),
        ("judge.api_key_env=MY_KEY", "judge.api_key_env=MY_KEY"),
        ("data.max_prompt_token_length=256", "data.max_prompt_token_length=256"),
        ("model.name_or_path=org/tokenizer-4b", "model.name_or_path=org/tokenizer-4b"),
    ],
)
def test_secrets_are_hidden(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_settings_that_carry_secrets_are_named_and_not_shown() -> None:
    config = to_json(RecipeConfig())
    config["command"]["env"] = ["TOKEN=abc"]
    config["grpo"]["beta"] = 0.5
    found = changed_settings(config)
    assert found == {"command.env": HIDDEN, "grpo.beta": 0.5}
    assert masked_overrides(["command.env=[A=b]", "seed=2"]) == (f"command.env={HIDDEN}", "seed=2")


@pytest.mark.parametrize(
    "word",
    [
        'judge.extra_body={"api_key": "abc123xyz"}',
        "judge.extra_body.api_key=abc123xyz",
        "command.env[0]=abc123xyz",
        'evaluate.note={"password": "abc123xyz"}',
        "judge.base_url=http://me:abc123xyz@host/v1",
        "--hf-token=abc123xyz",
    ],
)
def test_no_override_shows_a_secret(word: str) -> None:
    assert "abc123xyz" not in masked_overrides([word])[0]


# ---------------------------------------------------------------- large files


def test_only_wanted_metrics_of_a_log_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": n, "metrics": {"scores": n, "other": 1.0}} for n in (1, 2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "met')
    assert read_metrics(path, ["scores", "gone"]) == [(1, {"scores": 1}), (2, {"scores": 2})]
    assert [line.metrics.get("other") for line in read_metrics(path)] == [1.0, 1.0]


def test_answers_are_found_wherever_in_a_file_they_lie(tmp_path: Path) -> None:
    rows = [{"sample_id": f"p{n // 2}", "sample_index": n % 2, "text": str(n)} for n in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "samples.parquet")
    found = SamplesReader().rows(tmp_path / "samples.parquet", ["p9", "p1"])
    assert [row["text"] for row in found] == ["2", "18"], "the first sample of each, in order"


_PIECES = (
    "<answer>", "</answer>", "<answer x>", "<snippet id=S_1>", "<snippet id='S_2, S_9'>",
    "<snippet>", "<SNIPPET id=S_1>", "</snippet>", "<snippet id=S_1", "<webpage id=W_1>", " it is",
    " & so", "\n", ".", "\ud800",
)  # fmt: skip
_PROMPT = "<tool_output><snippet id=S_1> one</snippet><snippet id=S_2> two</snippet></tool_output>"


def test_claims_are_numbered_as_by_the_judge() -> None:
    rng = random.Random(1)
    evidence = evidence_of(_PROMPT, (), "e0")
    single = 0
    for _ in range(4_000):
        text = "".join(rng.choice(_PIECES) for _ in range(rng.randrange(12)))
        if rng.random() < 0.7:
            text = f"<answer>{text.replace('<answer>', '').replace('</answer>', '')}</answer>"
        parsed = parse_answer(text)
        markup = answer_markup(text, evidence)
        numbers = [int(n) for n in re.findall(r'data-n="(\d+)"', markup)]
        assert numbers == list(range(1, len(parsed.claims) + 1)), text
        shown = re.sub("<[^>]*>", "", markup)
        assert shown.replace("&#39;", "'").replace("&lt;", "<").replace("&gt;", ">").replace(
            "&amp;", "&"
        ) == plain(text), "nothing is lost or added"
        single += parsed.body is not None
    assert single > 2_000
