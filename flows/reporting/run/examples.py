"""What models have said to the same prompts before and after training, chosen by what it was worth.

In: the evaluations of a run. Out: :class:`~refiner_core.report.run.document.Example` values: the
prompts whose answers improved most, got worse most, and changed as most did, by the reward or, of
agents, by success. The first sample of each model is shown (of agents the first attempt): with
several samples a prompt's change is that of their means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from flows.reporting.questions import questions_of
from flows.reporting.run.numbers import Evaluated, before_and_after
from flows.reporting.run.reading import RunReading
from flows.reporting.run.said import MOST_OF_PROMPT, clip, said_in_evaluation
from flows.reporting.samples import SamplesReader
from refiner_core.report.run.document import Example, Said
from refiner_core.report.sweep.evidence import Question

#: How many of each kind, and the smallest change that is one.
_BETTER, _WORSE, _TYPICAL = 3, 3, 2
_NO_CHANGE = 1e-9
_METRICS = ("success", "reward", "oracle", "rubric_score")
_NONE = Question("", "")


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
    return reading.tried("Answers before and after training", _examples, reading, shown) or ()


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


def _examples(reading: RunReading, shown: Sequence[Evaluated]) -> tuple[Example, ...]:
    reader = SamplesReader()
    files = _files(shown)
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
    changes = {
        p: is_now[p] - was[p] for p in was if p in is_now and np.isfinite(is_now[p] - was[p])
    }
    chosen = choose(changes)
    prompts = [one.sample_id for one in chosen]
    answers = [
        _answers(reading, reader, e, file, prompts) for e, file in zip(shown, files, strict=True)
    ]
    asked = _asked(reading, shown[-1], prompts)
    return tuple(
        Example(
            kind="before and after",
            sample_id=one.sample_id,
            why=one.why,
            question=asked.get(one.sample_id, _NONE).question,
            prompt=clip(asked.get(one.sample_id, _NONE).prompt, MOST_OF_PROMPT),
            said=tuple(by[one.sample_id] for by in answers if one.sample_id in by),
            metric=metric,
            change=float(f"{one.change:.6g}"),
        )
        for one in chosen
    )


def _asked(reading: RunReading, one: Evaluated, prompts: Sequence[str]) -> dict[str, Question]:
    """What the prompts ask; says so where that is gone."""
    where = (reading.workspace, one.stage_id, one.attempt)
    found = reading.tried("The prompts of evaluations", questions_of, *where, prompts)
    if prompts and found == {}:
        reading.warnings.append("The prompts of evaluations are not there any more.")
    return found or {}


def _files(shown: Sequence[Evaluated]) -> list[str]:
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


def _answers(
    reading: RunReading, reader: SamplesReader, one: Evaluated, file: str, prompts: Sequence[str]
) -> dict[str, Said]:
    """What a model said first to each of the prompts."""
    reward = reading.config_of(one.name).reward
    rows = reader.rows(one.folder / file, prompts)
    first = {str(row["sample_id"]): row for row in reversed(rows)}
    return {p: said_in_evaluation(row, one.model, reward) for p, row in first.items()}
