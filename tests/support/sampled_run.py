"""A recorded run whose page of samples has everything: evaluations before and after, rollouts,
attempts of an agent, and hostile texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infra.store.traces import encode_rollouts
from refiner_core.environments.protocol import EpisodeRecord, TurnRecord
from tests.support.recorded_run import RecordedRun
from tests.support.sweep_reports import EMOJI, HOSTILE, RTL

BAD = f"{HOSTILE} {RTL} {EMOJI} \x00\x1b[31m __proto__ ]]> */ `${{alert(1)}}` \u2028 </SCRIPT>"


def sampled_run(root: Path) -> RecordedRun:
    """The run: 3 evaluations of 6 answers, 6 steps of 2 rollouts, a step of 3 odd ones."""
    run = RecordedRun(root)
    run.data()
    run.evaluate("evaluate-base", quality=0.5)
    run.train("sft")
    run.evaluate("evaluate-sft", quality=0.5)
    run.train("grpo")
    run.evaluate("evaluate-grpo", quality=1.0)
    odd = [_row(7, 0, BAD), _row(7, 1, ""), {**_row(7, 2, "x"), "episode": json.dumps(_episode())}]
    (rollouts(run) / "step-00000007.parquet").write_bytes(encode_rollouts(odd))
    return run


def rollouts(run: RecordedRun) -> Path:
    """The folder of the run's rollouts."""
    return run.workspace.layout.attempt(run.stage("grpo").id, 1).rollouts


def _row(step: int, number: int, text: str) -> dict[str, Any]:
    judgement = {"kind": "rubric", "title": BAD, "criterion": BAD, "detail": f"the judge: {BAD}"}
    unusable = {**judgement, "title": "Unusable one", "score": None, "status": "failed"}
    return {
        **{"step": step, "sample_id": f"odd {BAD}", "sample_index": number, "reward": 0.25},
        **{"response_text": text, "response_ids": [1, 2, 3], "finish_reason": "length"},
        **{"status": "scored", "advantage": None, "episode": None},
        "judgements": json.dumps([{**judgement, "score": 1.0, "weight": 2.0}, unusable]),
    }


def _episode() -> dict[str, Any]:
    call = {"name": "look_up", "arguments": {"order": BAD}}
    turns = (
        TurnRecord("", "ok", 0, 1, call=call, messages=(("tool", f"found it {BAD}"),)),
        TurnRecord("I give up.", "no_call", 1, 2),
    )
    checks = ({"kind": "state", "name": "refunded", "passed": False},)
    return EpisodeRecord(
        "task", "shop", 0, "scored", "no_call", (("user", "Where is my order?"),), turns,
        reward=0.0, failure="no_call", checks=checks,
    ).as_json()  # fmt: skip
