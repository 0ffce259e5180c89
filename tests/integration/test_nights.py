"""A night evaluated by real workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flows.checking.sources import model_digest
from refiner_core.nightly.definition import Schedule
from tests.support.command import called, refiner
from tests.support.judge_server import JudgeServer, completion

FILE = """
schedule: "0 3 * * *"
timezone: Europe/Berlin
recipe: tiny
overrides:
  - workspace=runs
  - data.synthetic_rl_rows=12
  - evaluate.max_prompts=2
  - evaluate.decoding=[greedy]
  - evaluate.bootstrap_samples=50
  - evaluate.fresh_reference=false
  - grpo.response_length=4
  - tracking.wandb=disabled
  - dispatch.poll_s=0.1
  - judge.kind=openai
  - judge.model=judge
  - judge.base_url={url}
checkpoints:
  - {{name: base, folder: "builtin:tiny"}}
canary: {{folder: "builtin:tiny", digest: {digest}}}
alerts:
  metrics: [reward, length_tokens]
"""
SCHEDULE = Schedule("0 3 * * *", "Europe/Berlin")


class Place:
    """A nightly file beside its workspace, and the judge that it asks."""

    def __init__(self, folder: Path, judge: JudgeServer) -> None:
        self.folder, self.judge = folder, judge
        self.file = folder / "real.yaml"
        digest = model_digest("builtin:tiny", "")
        self.file.write_text(FILE.format(url=judge.base_url, digest=digest))

    def run(self, *words: str) -> dict[str, Any]:
        """`refiner nightly run` from another folder, as cron would."""
        done = refiner("nightly", "run", str(self.file), *words, "--json")
        assert done.code == 0, done.stderr
        return dict(done.json)

    def history(self) -> list[dict[str, Any]]:
        done = called("nightly", "history", str(self.file), "--json")
        assert done.code == 0, done.stderr
        return list(done.json["rows"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A judge that says what it is, and the newest night evaluated once."""

    def print_line(body: dict[str, Any], _: int) -> Any:
        reply = json.loads(completion('{"score": 2}').body)
        reply |= {"model": "judge-7b", "system_fingerprint": "fp1"}
        from tests.support.judge_server import Reply

        return Reply(body=json.dumps(reply))

    with JudgeServer(print_line) as judge:
        yield Place(tmp_path_factory.mktemp("nightly"), judge)


def test_a_night_is_evaluated_by_ordinary_runs_and_the_canary_is_judged_afresh(
    place: Place,
) -> None:
    tonight = SCHEDULE.night_at(datetime.now(UTC))
    first = place.run()
    assert (first["night"], first["state"], first["late"]) == (tonight, "done", False)
    assert {c["checkpoint"]: c["state"] for c in first["checkpoints"]} == {
        "canary": "measured",
        "base": "measured",
    }
    rows = {r["checkpoint"]: r for r in place.history()}
    assert rows["canary"]["stage"] != rows["base"]["stage"]
    assert rows["canary"]["protocol"] == rows["base"]["protocol"], "one protocol, two stages"
    assert rows["canary"]["numbers"] == rows["base"]["numbers"], "the same weights"
    assert rows["canary"]["facts"]["judge.served"] == "judge-7b fp1"
    record = json.loads((place.folder / f"runs/runs/{rows['base']['run']}/run.json").read_text())
    assert record["provenance"]["nightly"] == {
        "name": "real",
        "night": tonight,
        "checkpoint": "base",
    }
    # The same questions, asked twice: the canary's answers are not taken from the store.
    asked = [json.dumps(b["messages"]) for b in place.judge.bodies]
    assert len(asked) == 2 * len(set(asked)) > 0

    again = place.run()
    assert (again["state"], again["checkpoints"]) == ("done", [])
    assert len(place.judge.bodies) == len(asked)
    assert len(place.history()) == 2
