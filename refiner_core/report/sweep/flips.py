"""The prompts on which an arm and the baseline differ most, and the answers themselves.

In: the group and metric of the sweep's question; texts by
:class:`~refiner_core.report.sweep.evidence.Stored`. Out:
:class:`~refiner_core.report.sweep.document.Flip` and
:class:`~refiner_core.report.sweep.document.SideBySide` values. A prompt that all seeds moved the
same way goes before one that a single seed moved as far.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from refiner_core.evaluation.metrics import EPISODE_METRICS
from refiner_core.evaluation.samples import METRICS
from refiner_core.report.sweep.document import Answer, Flip, SideBySide
from refiner_core.report.sweep.evidence import Evidence, Question
from refiner_core.report.sweep.groups import Group
from refiner_core.report.sweep.numbers import paired_layouts
from refiner_core.report.sweep.sides import Setting

#: Flips of an arm, where arms are few, and of all arms together.
_PER_ARM, _ALL = 10, 240
_SHOWN_FLIPS, _SHOWN_AT_RANDOM, _SHOWN_ARMS = 8, 4, 12
#: A smaller change is none.
_NO_CHANGE = 1e-9


def make_flips(evidence: Evidence, group: Group, metric: str) -> tuple[Flip, ...]:
    """The largest changes of each arm, largest first within an arm."""
    baseline = evidence.sweep.baseline
    setting = Setting(baseline, tuple(a.name for a in evidence.sweep.arms), evidence.sweep.seeds)
    layouts = paired_layouts(group, metric, setting)
    most = max(2, min(_PER_ARM, _ALL // max(1, len(layouts))))
    asked = group.cells[baseline, group.seeds_of(baseline)[0]]
    prompts, _ = asked.measured.means.about(metric)
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
            found.append(
                Flip(
                    arm=arm,
                    sample_id=prompts[place],
                    question="",
                    baseline=base,
                    value=base + float(mean[place]),
                    seeds_agree=int(agree[place]),
                    seeds=len(changes),
                )
            )
    return _with_questions(evidence, group, found)


def _mean_at(group: Group, arm: str, seeds: Sequence[int], metric: str, place: int) -> float:
    rows = [group.cells[arm, s].measured.means.about(metric)[1] for s in seeds]
    return float(np.mean([row[place] for row in rows if row is not None]))


def _with_questions(evidence: Evidence, group: Group, flips: Sequence[Flip]) -> tuple[Flip, ...]:
    asked = _questions(evidence, group, [f.sample_id for f in flips])
    none = Question("", "")
    return tuple(
        Flip(f.arm, f.sample_id, asked.get(f.sample_id, none).question,
             f.baseline, f.value, f.seeds_agree, f.seeds)
        for f in flips
    )  # fmt: skip


def _questions(evidence: Evidence, group: Group, prompts: Sequence[str]) -> dict[str, Question]:
    if evidence.stored is None or not prompts:
        return {}
    baseline = evidence.sweep.baseline
    cell = group.cells[baseline, group.seeds_of(baseline)[0]]
    return evidence.stored.questions(cell.evaluation, list(dict.fromkeys(prompts)))


def make_side_by_side(
    evidence: Evidence, group: Group, flips: Sequence[Flip]
) -> tuple[SideBySide, ...]:
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
    asked = group.cells[baseline, seed].measured.means.prompts
    prompts = _shown_prompts(asked, flips, evidence.sweep.name)
    questions = _questions(evidence, group, prompts)
    answers: dict[str, list[Answer]] = {prompt: [] for prompt in prompts}
    for arm in arms:
        cell = group.cells[arm, seed]
        for row in evidence.stored.answers(cell.evaluation, cell.measured, prompts):
            if row["sample_id"] in answers:
                answers[row["sample_id"]].append(_answer(arm, seed, row))
    none = Question("", "")
    return tuple(
        SideBySide(p, questions.get(p, none).question, questions.get(p, none).prompt, tuple(found))
        for p, found in answers.items()
        if found
    )


def _shown_arms(group: Group, baseline: str, flips: Sequence[Flip]) -> list[str]:
    """The baseline, and the arms with the largest changes, in the order of the group."""
    largest: dict[str, float] = {}
    for flip in flips:
        change = abs(flip.value - flip.baseline)
        largest[flip.arm] = max(change, largest.get(flip.arm, 0.0))
    others = [arm for arm in group.arms if arm != baseline]
    chosen = sorted(others, key=lambda arm: -largest.get(arm, 0.0))[: _SHOWN_ARMS - 1]
    return [baseline, *(arm for arm in others if arm in set(chosen))]


def _shown_prompts(asked: Sequence[str], flips: Sequence[Flip], seed: str) -> list[str]:
    ordered = sorted(flips, key=lambda f: (-f.seeds_agree / f.seeds, -abs(f.value - f.baseline)))
    known = set(asked)
    first = [p for p in dict.fromkeys(f.sample_id for f in ordered) if p in known][:_SHOWN_FLIPS]
    rest = [p for p in asked if p not in set(first)]
    drawn = random.Random(seed).sample(rest, min(_SHOWN_AT_RANDOM, len(rest)))
    return [*first, *drawn]


def _answer(arm: str, seed: int, row: Mapping[str, Any]) -> Answer:
    if "episode" in row:
        return _attempt(arm, seed, row)
    judgements = json.loads(row.get("judgements") or "[]")
    return Answer(
        arm=arm,
        seed=seed,
        sample_index=int(row["sample_index"]),
        text=str(row["response_text"]),
        metrics={m: row[m] for m in METRICS if row.get(m) is not None},
        judgements=tuple(judgements),
    )


def _attempt(arm: str, seed: int, row: Mapping[str, Any]) -> Answer:
    """An agent's attempt; what was said in it stands in its record."""
    return Answer(
        arm=arm,
        seed=seed,
        sample_index=int(row["sample_index"]),
        text="",
        metrics={m: row[m] for m in EPISODE_METRICS if row.get(m) is not None},
        episode={**json.loads(row["episode"]), "failure": row["failure"] or None},
    )
