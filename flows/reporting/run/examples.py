"""Answers of models as examples: before and after training, and in the course of GRPO.

In: the evaluations and rollouts of a run. Out: :class:`~refiner_core.report.run.document.Example`
values: the prompts whose answers improved most, got worse most, and changed as most did; prompts
that came early and late in training; the best, a typical and the worst sample of the last step. A
reward is taken apart by the formula of :mod:`refiner_core.rewards.combine`; where the parts do not
add up to what is recorded, they stand without their shares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from flows.reporting.run.numbers import Evaluated, before_and_after
from flows.reporting.run.stages import RunReading
from flows.reporting.samples import SamplesReader, questions_of
from flows.stored import TRAINED_ON, newest_rollouts
from infra.orchestrator.timeline import StageHistory
from infra.store.traces import read_rollouts
from refiner_core.contract.config import RewardConfig
from refiner_core.evaluation.metrics import EPISODE_METRICS, METRICS
from refiner_core.report.run.document import Example, RewardPart, Said
from refiner_core.report.sweep.evidence import Question
from refiner_core.rewards.combine import F1_SHARE, FORMAT_SHARE, reward_terms

#: Characters of an answer, of a prompt, and of each text of an episode or judgement that a report
#: keeps.
MOST_OF_ANSWER, MOST_OF_PROMPT, MOST_OF_TURN, MOST_OF_JUDGEMENT = 12_000, 24_000, 4_000, 1_500
_CUT = " […]"
_NEAR = 1e-6


def said_in_evaluation(row: Mapping[str, Any], model: str, reward: RewardConfig) -> Said:
    """One sample of an evaluation."""
    known = (*EPISODE_METRICS,) if "episode" in row else METRICS
    metrics = {m: row[m] for m in known if row.get(m) is not None and m != "reward"}
    f1, form = row.get("citation_f1"), row.get("citation_format")
    components = {
        "rubric": row.get("rubric_score"),
        "citation": (None if f1 is None or form is None else F1_SHARE * f1 + FORMAT_SHARE * form),
        "format_bonus": None,
    }
    return _said(row, model, metrics, () if "episode" in row else _parts(row, components, reward))


def said_in_training(row: Mapping[str, Any], reward: RewardConfig) -> Said:
    """One rollout, by the step it was sampled in."""
    mine = (key for key in row if key.startswith("reward/"))
    components = {key.removeprefix("reward/"): row[key] for key in mine}
    parts = _episode_parts(row, components) if "episode" in row else _parts(row, components, reward)
    of_parts = {"total", *(part.name for part in parts)}
    metrics = {k: v for k, v in components.items() if v is not None and k not in of_parts}
    if row.get("advantage") is not None:
        metrics["advantage"] = row["advantage"]
    return _said(row, f"step {row['step']}", metrics, parts)


def _said(
    row: Mapping[str, Any],
    model: str,
    metrics: Mapping[str, float | None],
    parts: Sequence[RewardPart],
) -> Said:
    stored = row.get("judgements")  # as text in files, or as they were
    judgements = (json.loads(stored) if isinstance(stored, str) else stored) or []
    episode = None
    if row.get("episode"):
        recorded = json.loads(row["episode"])
        # A failure stands in the samples' own column, in rollouts in the record itself.
        failure = row["failure"] or None if "failure" in row else recorded.get("failure")
        episode = clipped({**recorded, "failure": failure}, MOST_OF_TURN)
    return Said(
        model=model,
        text="" if episode is not None else clip(str(row["response_text"]), MOST_OF_ANSWER),
        status=str(row.get("status") or ""),
        finish_reason=str(row.get("finish_reason") or ""),
        reward=_finite(row.get("reward")),
        parts=tuple(parts),
        judgements=tuple(clipped(j, MOST_OF_JUDGEMENT) for j in judgements),
        metrics={k: _finite(v) for k, v in metrics.items()},
        episode=episode,
        failed=_failed(row, judgements, episode),
    )


def _failed(
    row: Mapping[str, Any],
    judgements: Sequence[Mapping[str, Any]],
    episode: Mapping[str, Any] | None,
) -> str:
    """Reason for a missing reward, or for an episode's failure; empty where nothing failed."""
    if episode is not None and (episode.get("error") or episode.get("failure")):
        kind = episode.get("error_kind") or episode.get("failure")
        return ": ".join(filter(None, [str(kind or ""), str(episode.get("error") or "")]))
    if row.get("status") not in ("unscored", "failed"):
        return ""
    details = [str(j.get("detail") or "") for j in judgements if j.get("status") != "scored"]
    return next(filter(None, details), "a judgement failed")


# ---------------------------------------------------------------- parts of a reward


def _parts(
    row: Mapping[str, Any], components: Mapping[str, float | None], reward: RewardConfig
) -> tuple[RewardPart, ...]:
    """The terms of the reward, weighed as the total has them."""
    total = _finite(row.get("reward"))
    if reward.non_stop_penalty and row.get("finish_reason") != "stop":
        value = reward.non_stop_penalty_value
        return (RewardPart("did not stop", 1.0, value, value),)
    without = bool(components.get("no_rubrics")) or components.get("rubric") is None
    known = {**components, "no_rubrics": float(without)}
    scale = reward.verification_reward
    parts = [
        _part(term.name, known.get(term.name), scale * term.weight * term.gate)
        for term in reward_terms(known, reward)
    ]
    return _checked(parts, total)


def _episode_parts(
    row: Mapping[str, Any], components: Mapping[str, float | None]
) -> tuple[RewardPart, ...]:
    """The environment's own reward, and partial credit by its weight."""
    counts = row.get("status") == "scored"  # of any other episode the reward is what a rule says
    alpha = components.get("alpha") or 0.0
    parts = [_part("reward", components.get("reward"), 1.0 if counts else 0.0)]
    if components.get("partial") is not None:
        parts.append(_part("partial", components["partial"], alpha if counts else 0.0))
    return _checked(parts, _finite(row.get("reward")))


def _part(name: str, value: float | None, weight: float) -> RewardPart:
    value, weighs = _finite(value), _finite(weight)
    share = None if value is None or weighs is None else value * weighs
    return RewardPart(name, value, weighs, share)


def _checked(parts: Sequence[RewardPart], total: float | None) -> tuple[RewardPart, ...]:
    """Shares only where they add up to the recorded reward."""
    shares = math.fsum(part.share or 0.0 for part in parts)
    if total is not None and abs(shares - total) <= _NEAR * max(1.0, abs(total)):
        return tuple(parts)
    return tuple(RewardPart(part.name, part.value) for part in parts)


def _finite(value: Any) -> float | None:
    known = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if known else None


# ---------------------------------------------------------------- long texts


def clip(text: str, most: int) -> str:
    """The beginning of a long text."""
    return text if len(text) <= most else text[:most] + _CUT


def clipped(value: Any, most: int) -> Any:
    """JSON whose long texts are cut; numbers that are not finite are None."""
    if isinstance(value, Mapping):
        return {str(k): clipped(v, most) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clipped(v, most) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return clip(value, most) if isinstance(value, str) else value


#: How many of each kind, and the smallest change that is one.
_BETTER, _WORSE, _TYPICAL = 3, 3, 2
_NO_CHANGE = 1e-9
_METRICS = ("success", "reward", "oracle", "rubric_score")


class Chosen(NamedTuple):
    """A prompt, why it is shown, and what changed there."""

    sample_id: str
    why: str
    change: float


def evaluation_examples(
    reading: RunReading, evaluations: Sequence[Evaluated]
) -> tuple[Example, ...]:
    """Answers before and after, under the first protocol that has both."""
    pairs = before_and_after(evaluations)
    if not pairs:
        return ()
    before, after = pairs[0]
    between = [e for e in evaluations if e.under == before.under and e.whole]
    shown = between[between.index(before) : between.index(after) + 1]
    return (
        reading.tried("Answers before and after training", _before_and_after, reading, shown) or ()
    )


def choose(changes: Mapping[str, float]) -> list[Chosen]:
    """The prompts to show, by the change of each; none of them twice."""
    order = sorted(changes, key=lambda p: (changes[p], p))
    better = [p for p in reversed(order) if changes[p] > _NO_CHANGE][:_BETTER]
    worse = [p for p in order if changes[p] < -_NO_CHANGE][:_WORSE]
    rest = [p for p in order if p not in {*better, *worse}]
    middle = float(np.median(list(changes.values()))) if changes else 0.0
    rest.sort(key=lambda p: (abs(changes[p] - middle), p))
    why = [("improved most", better), ("got worse most", worse), ("typical", rest[:_TYPICAL])]
    return [Chosen(p, word, changes[p]) for word, prompts in why for p in prompts]


def _before_and_after(reading: RunReading, shown: Sequence[Evaluated]) -> tuple[Example, ...]:
    reader = SamplesReader()
    files = _sample_files(shown)
    if not files:
        return ()
    ends = ((shown[0], files[0]), (shown[-1], files[-1]))
    means = [reader.means(one.folder / file) for one, file in ends]
    metric = next((m for m in _METRICS if all(m in mean.metrics for mean in means)), None)
    if metric is None:
        return ()
    was, is_now = (
        dict(zip(mean.prompts, values.tolist(), strict=True))
        for mean in means
        if (values := mean.of(metric)) is not None
    )
    changes = {p: is_now[p] - was[p] for p in was if p in is_now}
    chosen = choose({p: change for p, change in changes.items() if np.isfinite(change)})
    prompts = [one.sample_id for one in chosen]
    answers = []
    for evaluated, file in zip(shown, files, strict=True):
        reward = reading.config_of(evaluated.name).reward
        rows = reader.rows(evaluated.folder / file, prompts)
        first = {str(row["sample_id"]): row for row in reversed(rows)}
        model = evaluated.model
        answers.append({p: said_in_evaluation(row, model, reward) for p, row in first.items()})
    where = (reading.workspace, shown[-1].stage_id, shown[-1].attempt)
    asked = reading.tried("The prompts of evaluations", questions_of, *where, prompts)
    if prompts and asked == {}:
        reading.warnings.append("The prompts of evaluations are not there any more.")
    return tuple(
        _example(
            asked or {},
            one.sample_id,
            kind="before and after",
            why=one.why,
            said=tuple(by[one.sample_id] for by in answers if one.sample_id in by),
            metric=metric,
            change=float(f"{one.change:.6g}"),
        )
        for one in chosen
    )


def _example(asked: Mapping[str, Question], sample_id: str, **more: Any) -> Example:
    question = asked.get(sample_id, Question("", ""))
    prompt = clip(question.prompt, MOST_OF_PROMPT)
    return Example(sample_id=sample_id, question=question.question, prompt=prompt, **more)


def _sample_files(shown: Sequence[Evaluated]) -> list[str]:
    """The samples file of each, all of one decoding: greedy where all have it."""
    found = [
        {str(e["decoding"]): str(e["samples_file"]) for e in one.report["evaluations"]}
        for one in shown
    ]
    shared = [d for d in found[0] if all(d in files for files in found)]
    if not shared:
        return []
    decoding = "greedy" if "greedy" in shared else shared[0]
    return [files[decoding] for files in found]


#: Prompts that are shown twice, and how many steps at each end are looked through for them.
_TWICE, _ENDS = 2, 12
#: Columns that are most of a file and that nobody reads here.
_BULK = ("response_ids", "logprobs", "own", "turn_advantages")
Row = Mapping[str, Any]


def rollout_examples(reading: RunReading) -> tuple[Example, ...]:
    """Rollouts of the run's last GRPO stage that has any."""
    found: tuple[Example, ...] = ()
    for name, history in reading.of_kind("grpo"):
        _, files = newest_rollouts(reading.workspace, history.stage_id)
        if not files:
            if any(a.started_at for a in history.record.attempts) and history.record.result:
                reading.warnings.append(f"The rollouts of {name} are not there any more.")
            continue
        what = f"The rollouts of {name}"
        found = reading.tried(what, _rollouts, reading, name, history, files) or found
    return found


def _rollouts(
    reading: RunReading, name: str, history: StageHistory, files: Mapping[int, Path]
) -> tuple[Example, ...]:
    reward = reading.config_of(name).reward
    last = read_rollouts(files[max(files)], _BULK)
    shown = [*_early_and_late(files), *_of_one_step(last)]
    prompts = list(dict.fromkeys(str(rows[0]["sample_id"]) for _, rows in shown))
    where = (reading.workspace, history.stage_id, history.record.attempts[-1].number)
    asked = reading.tried(f"The prompts of {name}", questions_of, *where, prompts, TRAINED_ON)
    found = []
    for why, rows in shown:
        worth = [float(row["reward"]) for row in rows if row.get("reward") is not None]
        example = _example(
            asked or {},
            str(rows[0]["sample_id"]),
            kind="rollout",
            why=why,
            said=tuple(said_in_training(row, reward) for row in rows),
            metric="reward",
            change=float(f"{worth[1] - worth[0]:.6g}") if len(worth) == 2 else None,
        )
        found.append(example)
    return tuple(found)


# ---------------------------------------------------------------- which


def _early_and_late(files: Mapping[int, Path]) -> Iterator[tuple[str, list[Row]]]:
    """Prompts that were trained on in two steps, as far apart as can be found at both ends."""
    steps, ends = list(files), min(_ENDS, len(files) // 2)
    if not ends:
        return
    early = {p: s for s in reversed(steps[:ends]) for p in _prompts_in(files[s])}
    late = {p: s for s in steps[-ends:] for p in _prompts_in(files[s])}
    both = sorted(early.keys() & late.keys(), key=lambda p: (early[p] - late[p], p))
    for prompt in both[:_TWICE]:
        pair = (read_rollouts(files[s], _BULK) for s in (early[prompt], late[prompt]))
        found = [typical([r for r in rows if r["sample_id"] == prompt]) for rows in pair]
        yield "early and late in training", found


def _prompts_in(path: Path) -> set[str]:
    """Sample ids of a rollout file."""
    with pq.ParquetFile(path) as file:
        return set(file.read(["sample_id"]).column("sample_id").to_pylist())


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
