"""A run whose judge is pleased more and more while gold is not: stopped, published, reported.

Two scripted judges over HTTP, through the command. After the first look the training's judge
likes nearly everything, and gold nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.nightly.checkpoints import resolve
from infra.store.workspace import Workspace
from refiner_core.nightly.definition import Checkpoint, CheckpointSource
from tests.support.command import Finished, Stage, called, refiner
from tests.support.judge_server import JudgeServer, digest_of, score

ROWS = 40
GOLD = """
name: other-judge
reward: {{rubric_source: instance, apply_paper_citation_reward: false}}
judge: {{kind: openai, model: gold, base_url: "{url}", cache_gb: 0.0}}
"""


@pytest.fixture(scope="module")
def judges() -> Iterator[tuple[JudgeServer, JudgeServer]]:
    looked, turned = threading.Event(), threading.Event()

    def gold(body: dict[str, Any], call: int) -> Any:
        looked.set()
        return score(0 if turned.is_set() else 2)

    def training(body: dict[str, Any], call: int) -> Any:
        if looked.is_set():
            turned.set()
        return score(2 * (digest_of(body) % 10 < (9 if turned.is_set() else 2)))

    with JudgeServer(training) as one, JudgeServer(gold) as other:
        yield one, other


@pytest.fixture(scope="module")
def stopped(
    judges: tuple[JudgeServer, JudgeServer],
    small: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Finished]:
    root = tmp_path_factory.mktemp("monitor")
    (root / "gold.yaml").write_text(GOLD.format(url=judges[1].base_url))
    done = refiner(
        *("run", "tiny", f"workspace={root / 'runs'}", *small, "--no-server", "--json"),
        *("stages=[data,grpo,publish,evaluate]", "evaluate.models=[grpo]"),
        *("data.synthetic_rl_rows=120", "data.held_out_fraction=0.5", "evaluate.max_prompts=4"),
        *("judge.kind=openai", "judge.model=pays", f"judge.base_url={judges[0].base_url}"),
        *("judge.cache_gb=0", "reward.apply_paper_citation_reward=false"),
        *("grpo.num_training_steps=12", "grpo.save_freq=100", "grpo.learning_rate=6e-4"),
        *(f"monitor.gold=[{root / 'gold.yaml'}]", "monitor.every=2", f"monitor.rows={ROWS}"),
        *("monitor.action=stop", "monitor.keep=0.9", "monitor.alpha=0.5"),
        f"notify.command='cat >> {root / 'messages.jsonl'}'",
    )
    return root / "runs", done


def test_the_stop_is_a_result_and_later_stages_proceed(stopped: tuple[Path, Finished]) -> None:
    workspace, done = stopped
    assert done.code == 0, done.stderr
    stages = {s["name"]: s["state"] for s in done.json["stages"]}
    assert stages == dict.fromkeys(stages, "done")
    report = json.loads((Stage(workspace, "grpo").folder / "result.json").read_text())["report"]
    told = report["monitor"]
    assert 0 < told["stopped"] < 12
    assert report["steps"] == told["best"]
    assert "stopped by its monitor at step" in done.stderr
    assert list(workspace.glob("stages/*/holds/*")) == []


def test_the_message_of_the_end_and_a_night_say_so(stopped: tuple[Path, Finished]) -> None:
    workspace, _ = stopped
    (end,) = map(json.loads, (workspace.parent / "messages.jsonl").read_text().splitlines())
    assert (end["kind"], "grpo: stopped by its monitor" in end["text"]) == ("finished", True)
    newest = Checkpoint("newest", CheckpointSource("newest", "recipe tiny"))
    assert "stopped by its monitor at step" in resolve(newest, Workspace.read_only(workspace)).what


def test_status_report_and_card_say_so(stopped: tuple[Path, Finished]) -> None:
    workspace, _ = stopped
    said = called("status", f"workspace={workspace}")
    assert "stopped by its monitor at step" in said.stdout
    assert "stopped-by-monitor" in called("runs", f"workspace={workspace}", "--json").stdout
    page = called("report", f"workspace={workspace}", "--json").json
    assert {"monitor/proxy", "monitor/gold"} <= {c["metric"] for c in page["curves"]}
    assert "best by gold" in " ".join(page["warnings"])
    card = next(workspace.glob("published/**/README.md")).read_text()
    assert "training was stopped at step" in card
    assert called("card", "check", str(next(workspace.glob("published/**/README.md")))).code == 0
