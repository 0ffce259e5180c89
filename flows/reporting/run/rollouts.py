"""Rollouts of GRPO as examples: how samples of one prompt changed in the course of training.

In: a :class:`~flows.reporting.run.reading.RunReading`. Out:
:class:`~refiner_core.report.run.document.Example` values: prompts that came early and late, with a
typical sample of both; and the best, a typical and the worst sample of the last step, with one
that has no score. Rollouts that were reclaimed are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.reporting.questions import TRAINED_ON, questions_of
from flows.reporting.run.reading import RunReading
from flows.reporting.run.said import MOST_OF_PROMPT, clip, said_in_training
from infra.orchestrator.timeline import StageHistory
from infra.store.traces import list_rollouts, read_rollouts
from refiner_core.contract.config import RewardConfig
from refiner_core.report.run.document import Example
from refiner_core.report.sweep.evidence import Question

#: Prompts that are shown twice, and how many steps at each end are looked through for them.
_TWICE, _ENDS = 2, 12
#: Columns that are most of a file and that nobody reads here.
_BULK = ("response_ids", "logprobs", "own", "turn_advantages")
_NONE = Question("", "")
Row = Mapping[str, Any]


def rollout_examples(reading: RunReading) -> tuple[Example, ...]:
    """Rollouts of the run's last GRPO stage that has any."""
    found: tuple[Example, ...] = ()
    for name, history in reading.of_kind("grpo"):
        files = _files(reading, history)
        if not files:
            if any(a.started_at for a in history.record.attempts) and history.record.result:
                reading.warnings.append(f"The rollouts of {name} are not there any more.")
            continue
        what = f"The rollouts of {name}"
        found = reading.tried(what, _examples, reading, name, history, files) or found
    return found


def _files(reading: RunReading, history: StageHistory) -> list[Path]:
    """Of the newest attempt that has any: its files tell the whole story."""
    for attempt in reversed(history.record.attempts):
        paths = reading.workspace.layout.attempt(history.stage_id, attempt.number)
        if files := list_rollouts(paths.rollouts):
            return files
    return []


def _examples(
    reading: RunReading, name: str, history: StageHistory, files: Sequence[Path]
) -> tuple[Example, ...]:
    reward = reading.config_of(name).reward
    last = read_rollouts(files[-1], _BULK)
    shown = [*_early_and_late(files), *_of_one_step(last)]
    prompts = list(dict.fromkeys(str(rows[0]["sample_id"]) for _, rows in shown))
    where = (reading.workspace, history.stage_id, history.record.attempts[-1].number)
    asked = reading.tried(f"The prompts of {name}", questions_of, *where, prompts, TRAINED_ON)
    return tuple(_example(why, rows, asked or {}, reward) for why, rows in shown)


def _example(
    why: str, rows: Sequence[Row], asked: Mapping[str, Question], reward: RewardConfig
) -> Example:
    prompt = str(rows[0]["sample_id"])
    worth = [float(row["reward"]) for row in rows if row.get("reward") is not None]
    return Example(
        kind="rollout",
        sample_id=prompt,
        why=why,
        question=asked.get(prompt, _NONE).question,
        prompt=clip(asked.get(prompt, _NONE).prompt, MOST_OF_PROMPT),
        said=tuple(said_in_training(row, reward) for row in rows),
        metric="reward",
        change=float(f"{worth[1] - worth[0]:.6g}") if len(worth) == 2 else None,
    )


# ---------------------------------------------------------------- which


def _early_and_late(files: Sequence[Path]) -> Iterator[tuple[str, list[Row]]]:
    """Prompts that were trained on in two steps, as far apart as can be found at both ends."""
    if len(files) < 2:
        return
    half = len(files) // 2
    early = {p: f for f in reversed(files[: min(_ENDS, half)]) for p in prompts_of(f)}
    late = {p: f for f in files[-min(_ENDS, half) :] for p in prompts_of(f)}
    both = sorted(early.keys() & late.keys(), key=lambda p: (_step(early[p]) - _step(late[p]), p))
    for prompt in both[:_TWICE]:
        pair = [_typical_of(f, prompt) for f in (early[prompt], late[prompt])]
        yield "early and late in training", pair


def prompts_of(path: Path) -> list[str]:
    """Sample ids of a rollout file, each once."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        ids: list[str] = file.read(["sample_id"]).column("sample_id").to_pylist()
    return list(dict.fromkeys(ids))


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _typical_of(path: Path, prompt: str) -> Row:
    rows = [r for r in read_rollouts(path, _BULK) if r["sample_id"] == prompt]
    return typical(rows)


def typical(rows: Sequence[Row]) -> Row:
    """The sample in the middle by reward; where none has one, the first."""
    scored = sorted((r for r in rows if r.get("reward") is not None), key=_worth)
    return scored[(len(scored) - 1) // 2] if scored else rows[0]


def _of_one_step(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The best, a typical and the worst sample, and one without a score, where there are such."""
    scored = sorted((r for r in rows if r.get("reward") is not None), key=_worth)
    if scored:
        yield "best", [scored[-1]]
    if len(scored) > 2:
        yield "typical", [typical(scored)]
    if len(scored) > 1:
        yield "worst", [scored[0]]
    unscored = next((r for r in rows if r.get("reward") is None), None)
    if unscored is not None:
        yield "no score", [unscored]


def _worth(row: Row) -> tuple[float, str, int]:
    return float(row["reward"]), str(row["sample_id"]), int(row["sample_index"])
