"""Breakdown of a sweep's result by judge, by rubric and by prompt.

In: groups of evaluations of the last model, and their comparisons; texts from the evidence's
``stored``. Out: the judge x arm matrix, credit per rubric and arm, and the prompts on which an arm
and the baseline differ most, with their answers.

An arm evaluated after the judge had moved has no rank. A judge that trains no arm is held
out: training exploits the weaknesses of its judge. Credit is the score of a positive
rubric and 1 - score of a negative one; malformed answers were not judged and are not included. The
number of evaluations read is limited to keep a report fast. A prompt that all seeds moved in the
same direction ranks above one that a single seed moved as far.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from refiner_core.evaluation.metrics import EPISODE_METRICS, METRICS
from refiner_core.evaluation.statistics import Difference, two_way_means
from refiner_core.report.sweep.evidence import Group, SweepEvidence, judge_and_rubrics
from refiner_core.report.sweep.numbers import paired_layouts
from refiner_core.report.sweep.sweep_report import Comparison, Row, leading

METRIC = "rubric_score"


def make_matrix(
    evidence: SweepEvidence, chosen: Group, comparisons: Sequence[Comparison]
) -> Iterator[Row]:
    """A row for each comparison of judged scores of the question's model and decoding."""
    trains = _trained_by(evidence, chosen.model)
    for one in comparisons:
        key = one.key
        if (key.model, key.decoding, key.metric) != (chosen.model, chosen.decoding, METRIC):
            continue
        protocol = evidence.protocols.get(key.protocol, {})
        judge, rubrics = judge_and_rubrics(protocol)
        numbers = {n.arm: n for n in one.numbers if n.value is not None}
        moved = {arm for arm, n in numbers.items() if n.verdict == "judge moved"}
        steady = {arm: n.value for arm, n in numbers.items() if arm not in moved}
        ranks = pd.Series(steady, dtype=float).round(9).rank(ascending=False, method="min")
        names = [arm.name for arm in evidence.sweep.arms]
        yield {
            **{"protocol": key.protocol_name, "judge": judge, "rubrics": rubrics},
            **{"metric": METRIC, "decoding": key.decoding},
            "trains": tuple(a for a in names if trains.get(a) == _asked(protocol)),
            "cells": [
                {
                    "arm": arm,
                    **{k: getattr(numbers.get(arm), k, None) for k in ("value", "low", "high")},
                    "rank": int(ranks[arm]) if arm in ranks else None,
                    "moved": arm in moved,
                }
                for arm in names
            ],
        }


def _trained_by(evidence: SweepEvidence, model: str) -> dict[str, tuple[object, object]]:
    """Arm -> judge and rubrics of its reward, from its evaluation under its own protocol."""
    found: dict[str, tuple[object, object]] = {}
    for trial in evidence.trials:
        own = evidence.evaluations.get(trial.stages.get(f"evaluate-{model}", ""))
        if own and trial.row["arm"] not in found:
            found[trial.row["arm"]] = _asked(evidence.protocols.get(own[0].protocol, {}))
    return found


def _asked(protocol: Mapping[str, Any]) -> tuple[object, object]:
    return protocol.get("judge"), protocol.get("rubrics")


Floats = npt.NDArray[np.float64]
#: Limit on evaluations read.
_MOST_READ = 80


def make_rubrics(
    evidence: SweepEvidence, group: Group, differences: Mapping[str, float]
) -> tuple[Row, ...]:
    """A row per rubric, those that differ most between arms first.

    ``differences`` are the arms' differences on the sweep's question.
    """
    if evidence.stored is None or evidence.sweep.baseline not in group.arms:
        return ()
    baseline = evidence.sweep.baseline
    asked = group.cells[baseline, group.seeds_of(baseline)[0]].means.prompts
    arms = leading(group.arms, baseline, differences, _MOST_READ)
    seeds = sorted({seed for _, seed in group.cells})[: max(1, _MOST_READ // len(arms))]
    names: tuple[tuple[str, str], ...] | None = None
    credit: dict[tuple[str, int], Floats] = {}  # [rubrics, prompts]
    for place in product(arms, seeds):
        cell = group.cells.get(place)
        if cell is None or cell.means.prompts != asked:
            continue
        if (found := evidence.stored.rubrics(cell, names)) is not None:
            names, credit[place] = names or found[0], found[1]
    rows: list[dict[str, Any]] = [
        {"rubric": title, "kind": kind, "n": 0, "values": {}, "differences": {}}
        for title, kind in names or ()
    ]
    for arm in arms if baseline in {arm for arm, _ in credit} else ():
        own = [s for s in seeds if (arm, s) in credit]
        shared = [s for s in own if arm != baseline and (baseline, s) in credit]
        for row, mean in zip(rows, _over([credit[arm, s] for s in own]), strict=False):
            if mean.n:
                row["values"][arm], row["n"] = mean.value, max(row["n"], mean.n)
        changes = _over([credit[arm, s] - credit[baseline, s] for s in shared])
        for row, change in zip(rows, changes, strict=False):
            if change.n:
                row["differences"][arm] = (change.value, change.low, change.high)
    return tuple(sorted((row for row in rows if row["values"]), key=_largest, reverse=True))


def _over(by_seed: Sequence[Floats]) -> list[Difference]:
    """The mean of each rubric over seeds and prompts."""
    return two_way_means(np.stack(by_seed, axis=1)) if by_seed else []


def _largest(row: Row) -> float:
    return max((abs(d[0]) for d in row["differences"].values()), default=-1.0)


#: Flips of an arm, if arms are few, and of all arms together.
_PER_ARM, _ALL = 10, 240
_SHOWN_FLIPS, _SHOWN_AT_RANDOM, _SHOWN_ARMS = 8, 4, 12
#: Text for a prompt that is no longer stored.
_NONE: Row = {"question": "", "prompt": ""}


def make_flips(evidence: SweepEvidence, group: Group, metric: str) -> tuple[Row, ...]:
    """The largest changes of each arm, largest first within an arm."""
    baseline = evidence.sweep.baseline
    layouts = paired_layouts(group, metric, baseline)
    most = max(2, min(_PER_ARM, _ALL // max(1, len(layouts))))
    asked = group.cells[baseline, group.seeds_of(baseline)[0]]
    prompts, _ = asked.means.about(metric)
    found = []
    for arm, layout in layouts.items():
        seeds = [s for s in group.seeds_of(arm) if (baseline, s) in group.cells]
        base = [group.cells[baseline, s].means.about(metric)[1] for s in seeds]
        changes = pd.DataFrame(layout, columns=list(prompts))
        table = pd.DataFrame({"mean": changes.mean(skipna=False)})
        table["agree"] = np.sign(changes).eq(np.sign(table["mean"])).sum()
        table["size"] = table["mean"].abs().round(9)
        table["base"] = np.mean([row for row in base if row is not None], axis=0)
        order = table[table["size"] > 0].sort_values(
            ["size", "agree"], ascending=False, kind="stable"
        )
        for prompt, row in order.head(most).iterrows():
            change = {"baseline": float(row["base"]), "value": float(row["base"] + row["mean"])}
            agreed = {"seeds_agree": int(row["agree"]), "seeds": len(layout)}
            found.append({"arm": arm, "sample_id": prompt, **change, **agreed})
    questions = _questions(evidence, group, [flip["sample_id"] for flip in found])
    return tuple({**f, "question": questions.get(f["sample_id"], _NONE)["question"]} for f in found)


def _questions(evidence: SweepEvidence, group: Group, prompts: Sequence[str]) -> dict[str, Row]:
    if evidence.stored is None or not prompts:
        return {}
    baseline = evidence.sweep.baseline
    cell = group.cells[baseline, group.seeds_of(baseline)[0]]
    found: dict[str, Row] = evidence.stored.questions(cell.stage, list(dict.fromkeys(prompts)))
    return found


def make_side_by_side(
    evidence: SweepEvidence, group: Group, flips: Sequence[Row]
) -> tuple[Row, ...]:
    """Answers of the baseline and the arms to the prompts that changed most, and to some random
    ones: one sample each (for agents the first attempts), of the first seed that all shown arms
    have."""
    baseline = evidence.sweep.baseline
    if evidence.stored is None or baseline not in group.arms:
        return ()
    changes: dict[str, float] = {}
    for flip in flips:
        change = abs(flip["value"] - flip["baseline"])
        changes[flip["arm"]] = max(change, changes.get(flip["arm"], 0.0))
    arms = leading(group.arms, baseline, changes, _SHOWN_ARMS)
    shared = set.intersection(*(set(group.seeds_of(arm)) for arm in arms))
    if not shared:
        return ()
    seed = min(shared)
    asked = group.cells[baseline, seed].means.prompts
    prompts = _shown_prompts(asked, flips, evidence.sweep.name)
    questions = _questions(evidence, group, prompts)
    answers: dict[str, list[Row]] = {prompt: [] for prompt in prompts}
    for arm in arms:
        cell = group.cells[arm, seed]
        for row in evidence.stored.answers(cell, prompts):
            if row["sample_id"] in answers:
                answers[row["sample_id"]].append(_answer(arm, seed, row))
    return tuple(
        {"sample_id": p, **questions.get(p, _NONE), "answers": found}
        for p, found in answers.items()
        if found
    )


def _shown_prompts(asked: Sequence[str], flips: Sequence[Row], seed: str) -> list[str]:
    def order(flip: Row) -> tuple[float, float]:
        agree = flip["seeds_agree"] / flip["seeds"]
        return -agree, -abs(flip["value"] - flip["baseline"])

    ordered = sorted(flips, key=order)
    known = set(asked)
    first = [p for p in dict.fromkeys(f["sample_id"] for f in ordered) if p in known][:_SHOWN_FLIPS]
    rest = [p for p in asked if p not in set(first)]
    drawn = random.Random(seed).sample(rest, min(_SHOWN_AT_RANDOM, len(rest)))
    return [*first, *drawn]


def _answer(arm: str, seed: int, row: Mapping[str, Any]) -> Row:
    """A stored answer, or an agent's attempt, whose text is in its record."""
    is_attempt = "episode" in row
    metrics = EPISODE_METRICS if is_attempt else METRICS
    episode = None
    if is_attempt:
        episode = {**json.loads(row["episode"]), "failure": row["failure"] or None}
    return {
        "arm": arm,
        "seed": seed,
        "sample_index": int(row["sample_index"]),
        "text": "" if is_attempt else str(row["response_text"]),
        "metrics": {m: row[m] for m in metrics if row.get(m) is not None},
        "judgements": () if is_attempt else tuple(json.loads(row.get("judgements") or "[]")),
        "episode": episode,
    }
