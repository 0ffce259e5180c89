"""Breakdown of a sweep's result by judge, by rubric and by prompt.

In: groups of evaluations of the last model; texts by
the evidence's ``stored``. Out: the judge x policy matrix with how far its
rows agree on the order of arms (Kendall's tau-b), credit per rubric and arm, and the prompts on
which an arm and the baseline differ most, with their answers.

An arm whose evaluations met a judge that had moved has no rank. A judge that trains no arm is held
out: training finds the weaknesses of the judge that it asks. Credit is the score of a positive
rubric and 1 - score of a negative one; malformed answers were not judged and are not in it. Of very
many evaluations only so many are read that a report stays quick. A prompt that all seeds moved the
same way goes before one that a single seed moved as far.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from refiner_core.evaluation.metrics import EPISODE_METRICS, METRICS
from refiner_core.evaluation.statistics import two_way_means
from refiner_core.report.printing import finite
from refiner_core.report.sweep.document import Comparison, Row
from refiner_core.report.sweep.evidence import Evidence, Group, judge_and_rubrics
from refiner_core.report.sweep.numbers import paired_layouts

METRIC = "rubric_score"
#: Means that differ by less are one rank.
_SAME = 1e-9
_FEWEST_ARMS = 3


def make_matrix(
    evidence: Evidence,
    groups: Sequence[Group],
    chosen: Group | None,
    comparisons: Sequence[Comparison] = (),
) -> tuple[Row, ...]:
    """Rows in the order of groups, for the model and decoding of the sweep's question.

    ``comparisons`` say under which protocols the judge of an arm has moved.
    """
    if chosen is None:
        return ()
    fitting = [
        g
        for g in groups
        if (g.model, g.decoding) == (chosen.model, chosen.decoding) and METRIC in g.metrics
    ]
    trains = _trained_by(evidence, chosen.model)
    moved = _moved(comparisons, chosen.model)
    return tuple(
        _row(evidence, group, trains, moved.get(group.protocol, frozenset())) for group in fitting
    )


def _moved(comparisons: Sequence[Comparison], model: str) -> dict[str, frozenset[str]]:
    """Protocol -> arms whose judge has moved."""
    return {
        c.key.protocol: frozenset(n.arm for n in c.numbers if n.verdict == "judge moved")
        for c in comparisons
        if c.key.metric == METRIC and c.key.model == model
    }


def _row(
    evidence: Evidence,
    group: Group,
    trains: Mapping[str, tuple[object, object]],
    moved: frozenset[str],
) -> Row:
    protocol = evidence.protocols.get(group.protocol, {})
    judge, rubrics = judge_and_rubrics(protocol)
    arms = [arm.name for arm in evidence.sweep.arms]
    means = {arm: _mean(group, arm) for arm in arms}
    known = [m[0] for arm, m in means.items() if m is not None and arm not in moved]
    cells = []
    for arm, found in means.items():
        value, low, high = found or (None, None, None)
        gone = value is not None and arm in moved
        rank = None
        if value is not None and not gone:
            rank = 1 + sum(other > value + _SAME for other in known)
        shown = {"arm": arm, "value": value, "low": low, "high": high, "rank": rank}
        cells.append({**shown, "moved": gone})
    return {
        "protocol": group.name,
        "judge": judge,
        "rubrics": rubrics,
        "metric": METRIC,
        "decoding": group.decoding,
        "trains": tuple(arm for arm in arms if trains.get(arm) == _asked(protocol)),
        "cells": cells,
    }


def _mean(group: Group, arm: str) -> tuple[float, float | None, float | None] | None:
    rows = [group.cells[arm, s].means.of(METRIC) for s in group.seeds_of(arm)]
    found = [row for row in rows if row is not None]
    if not found or len({len(row) for row in found}) > 1:
        return None
    (mean,) = two_way_means(np.stack(found)[None])
    return (mean.value, mean.low, mean.high) if mean.n else None


def _trained_by(evidence: Evidence, model: str) -> dict[str, tuple[object, object]]:
    """Arm -> judge and rubrics of its reward, as its evaluation under its own protocol has them."""
    found: dict[str, tuple[object, object]] = {}
    for trial in evidence.trials:
        own = evidence.evaluations.get(trial.stages.get(f"evaluate-{model}", ""))
        if own and trial.row["arm"] not in found:
            found[trial.row["arm"]] = _asked(evidence.protocols.get(own[0].protocol, {}))
    return found


def _asked(protocol: Mapping[str, Any]) -> tuple[object, object]:
    return protocol.get("judge"), protocol.get("rubrics")


def make_agreement(matrix: Sequence[Row]) -> tuple[Row, ...]:
    """Agreement of each two rows on the order of arms; of arms that both have, at least three."""
    means = pd.DataFrame(
        {
            i: {c["arm"]: np.nan if c["moved"] else c["value"] for c in row["cells"]}
            for i, row in enumerate(matrix)
        },
        dtype=float,
    ).round(9)
    found = []
    for i, j in combinations(means.columns, 2):
        both = means[[i, j]].dropna()
        if len(both) >= _FEWEST_ARMS:
            tau = float(both[i].corr(both[j], method="kendall"))
            agreed = {"first": i, "second": j, "tau": finite(tau), "arms": len(both)}
            found.append(agreed)
    return tuple(found)


Floats = npt.NDArray[np.float64]
#: Evaluations that are read.
_MOST_READ = 80


def make_rubrics(
    evidence: Evidence, group: Group, differences: Mapping[str, float]
) -> tuple[Row, ...]:
    """A row per rubric, those that differ most between arms first.

    ``differences`` are those of arms on the sweep's question.
    """
    if evidence.stored is None or evidence.sweep.baseline not in group.arms:
        return ()
    baseline = evidence.sweep.baseline
    asked = group.cells[baseline, group.seeds_of(baseline)[0]].means.prompts
    arms = _arms(group, baseline, differences)
    seeds = sorted({seed for _, seed in group.cells})[: max(1, _MOST_READ // len(arms))]
    names: tuple[tuple[str, str], ...] | None = None
    by_arm: dict[str, dict[int, Floats]] = {}
    for arm in arms:
        for seed in seeds:
            cell = group.cells.get((arm, seed))
            if cell is None or cell.means.prompts != asked:
                continue
            found = evidence.stored.rubrics(cell, names)
            if found is None:
                continue
            names = names or found[0]
            by_arm.setdefault(arm, {})[seed] = found[1]
    if names is None or baseline not in by_arm:
        return ()
    rows = [_rubric_row(name, i, by_arm, baseline) for i, name in enumerate(names)]
    return tuple(sorted(rows, key=_largest, reverse=True))


def _arms(group: Group, baseline: str, differences: Mapping[str, float]) -> list[str]:
    """The baseline, then the arms that are read, in the order of the group."""
    others = [arm for arm in group.arms if arm != baseline]
    by_size = sorted(others, key=lambda arm: -abs(differences.get(arm, 0.0)))
    kept = set(by_size[: _MOST_READ - 1])
    return [baseline, *(arm for arm in others if arm in kept)]


def _rubric_row(
    name: tuple[str, str], place: int, by_arm: dict[str, dict[int, Floats]], baseline: str
) -> Row:
    base = {seed: values[place] for seed, values in by_arm[baseline].items()}
    means, differences = {}, {}
    n = 0
    for arm, seeds in by_arm.items():
        mine = {seed: values[place] for seed, values in seeds.items()}
        (mean,) = two_way_means(np.stack(list(mine.values()))[None])
        if not mean.n:
            continue
        means[arm] = mean.value
        n = max(n, mean.n)
        shared = [seed for seed in mine if seed in base]
        if arm == baseline or not shared:
            continue
        (found,) = two_way_means(np.stack([mine[s] - base[s] for s in shared])[None])
        if found.n:
            differences[arm] = (found.value, found.low, found.high)
    counts = {"rubric": name[0], "kind": name[1], "n": n}
    return {**counts, "values": means, "differences": differences}


def _largest(row: Row) -> float:
    return max((abs(d[0]) for d in row["differences"].values()), default=-1.0)


#: Flips of an arm, where arms are few, and of all arms together.
_PER_ARM, _ALL = 10, 240
_SHOWN_FLIPS, _SHOWN_AT_RANDOM, _SHOWN_ARMS = 8, 4, 12
#: Of a prompt that is stored no more.
_NONE: Row = {"question": "", "prompt": ""}
#: A smaller change is none.
_NO_CHANGE = 1e-9


def make_flips(evidence: Evidence, group: Group, metric: str) -> tuple[Row, ...]:
    """The largest changes of each arm, largest first within an arm."""
    baseline = evidence.sweep.baseline
    layouts = paired_layouts(group, metric, baseline)
    most = max(2, min(_PER_ARM, _ALL // max(1, len(layouts))))
    asked = group.cells[baseline, group.seeds_of(baseline)[0]]
    prompts, _ = asked.means.about(metric)
    found = []
    for arm, changes in layouts.items():
        seeds = [s for s in group.seeds_of(arm) if (baseline, s) in group.cells]
        known = ~np.isnan(changes).any(axis=0)
        mean = np.where(known, np.where(known, changes, 0.0).mean(axis=0), 0.0)
        agree = (np.sign(changes) == np.sign(mean)).sum(axis=0)
        order = np.lexsort((np.arange(len(mean)), -agree, -np.abs(mean).round(9)))
        for place in order[:most]:
            if abs(mean[place]) <= _NO_CHANGE:
                break
            base = _mean_at(group, baseline, seeds, metric, int(place))
            change = {"baseline": base, "value": base + float(mean[place])}
            agreed = {"seeds_agree": int(agree[place]), "seeds": len(changes)}
            found.append({"arm": arm, "sample_id": prompts[place], **change, **agreed})
    questions = _questions(evidence, group, [flip["sample_id"] for flip in found])
    return tuple({**f, "question": questions.get(f["sample_id"], _NONE)["question"]} for f in found)


def _mean_at(group: Group, arm: str, seeds: Sequence[int], metric: str, place: int) -> float:
    rows = [group.cells[arm, s].means.about(metric)[1] for s in seeds]
    return float(np.mean([row[place] for row in rows if row is not None]))


def _questions(evidence: Evidence, group: Group, prompts: Sequence[str]) -> dict[str, Row]:
    if evidence.stored is None or not prompts:
        return {}
    baseline = evidence.sweep.baseline
    cell = group.cells[baseline, group.seeds_of(baseline)[0]]
    found: dict[str, Row] = evidence.stored.questions(cell.stage, list(dict.fromkeys(prompts)))
    return found


def make_side_by_side(evidence: Evidence, group: Group, flips: Sequence[Row]) -> tuple[Row, ...]:
    """Answers of the baseline and the arms to the prompts that changed most, and to some that were
    drawn at random: one sample each (of agents the first attempts), of the first seed that all
    shown arms have."""
    baseline = evidence.sweep.baseline
    if evidence.stored is None or baseline not in group.arms:
        return ()
    arms = _shown_arms(group, baseline, flips)
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


def _shown_arms(group: Group, baseline: str, flips: Sequence[Row]) -> list[str]:
    """The baseline, and the arms with the largest changes, in the order of the group."""
    largest: dict[str, float] = {}
    for flip in flips:
        change = abs(flip["value"] - flip["baseline"])
        largest[flip["arm"]] = max(change, largest.get(flip["arm"], 0.0))
    others = [arm for arm in group.arms if arm != baseline]
    chosen = sorted(others, key=lambda arm: -largest.get(arm, 0.0))[: _SHOWN_ARMS - 1]
    return [baseline, *(arm for arm in others if arm in set(chosen))]


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
    """A stored answer, or an agent's attempt: what was said in it stands in its record."""
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
