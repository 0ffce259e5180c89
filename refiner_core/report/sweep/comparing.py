"""The report of a sweep from its evidence.

::

    evidence ─ groups ──> numbers (arms against the baseline) ──┐
        │         └─────> matrix (judges x policies), rubrics ──┼─> SweepReport
        ├─ curves (training) ───────────────────────────────────┤
        └─ flips (prompts that changed, answers side by side) ──┘

An arm evaluated after the judge had moved has no rank in the matrix. A judge that trains no arm is
held out: training exploits the weaknesses of its judge. Credit of a rubric is the score of a
positive one and 1 - score of a negative one; malformed answers were not judged and are not
included. The number of evaluations read is limited to keep a report fast. A prompt that all seeds
moved in the same direction ranks above one that a single seed moved as far.

Pure except for the evidence's ``stored``, which loads the few texts that are shown.
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

from refiner_core.contract.kinds import MODELS
from refiner_core.evaluation.metrics import EPISODE_METRICS, METRICS
from refiner_core.evaluation.power import detectable_effect, mean_components, variance_components
from refiner_core.evaluation.statistics import Difference, two_way_means
from refiner_core.report.printing import counted
from refiner_core.report.sweep.evidence import (
    Group,
    SweepEvidence,
    Training,
    TrialEvidence,
    judge_and_rubrics,
    make_groups,
)
from refiner_core.report.sweep.numbers import (
    ALPHA,
    ComparisonSetting,
    compare_group,
    paired_layouts,
)
from refiner_core.report.sweep.sweep_report import (
    REPORT_VERSION,
    Comparison,
    Row,
    SweepReport,
    leading,
)
from refiner_core.report.transcripts import summed

Floats = npt.NDArray[np.float64]
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


#: Metrics shown, if a stage logs them.
SHOWN = (
    "scores",
    "objective/rubric_reward",
    "objective/citation_reward",
    "objective/kl3_avg",
    "val/stop_rate",
    "val/sequence_lengths",
    "policy/clipfrac_avg",
    "loss/train_avg",
    "loss/validation",
)
#: Points of all curves together, and the fewest and most of one.
_ALL_POINTS = 30_000
_FEWEST, _MOST = 12, 200


def make_curves(evidence: SweepEvidence) -> tuple[Row, ...]:
    """Curves by stage and metric, arms in the order of the sweep."""
    by_stage: dict[str, dict[str, dict[int, Training]]] = {}
    for trial in evidence.trials:
        for name, stage in trial.trainings.items():
            training = evidence.trainings[stage]
            arms = by_stage.setdefault(name, {})
            arms.setdefault(trial.row["arm"], {})[trial.row["seed"]] = training
    found = [
        (name, metric, arm, seeds)
        for name, arms in by_stage.items()
        if not _shared(arms)
        for metric in _in_order(arms)
        for arm, seeds in arms.items()
        if any(metric in t for t in seeds.values())
    ]
    most = min(_MOST, max(_FEWEST, _ALL_POINTS // max(1, len(found))))
    return tuple(_curve(name, metric, arm, seeds, most) for name, metric, arm, seeds in found)


def _in_order(arms: Mapping[str, Mapping[int, Training]]) -> list[str]:
    """Each logged metric once: those of sweeps first."""
    found = {
        metric for seeds in arms.values() for training in seeds.values() for metric in training
    }
    return [*(m for m in SHOWN if m in found), *sorted(found - {*SHOWN})]


def _shared(arms: Mapping[str, Mapping[int, Training]]) -> bool:
    seeds = {seed for trainings in arms.values() for seed in trainings}
    return len(arms) > 1 and all(
        len({id(t[seed]) for t in arms.values() if seed in t}) == 1 for seed in seeds
    )


def _curve(stage: str, metric: str, arm: str, seeds: Mapping[int, Training], most: int) -> Row:
    logged = [t[metric] for t in seeds.values() if metric in t]
    steps = np.unique(np.concatenate([at for at, _ in logged]))
    if len(steps) > most:
        steps = steps[np.unique(np.linspace(0, len(steps) - 1, most).round().astype(int))]
    table = np.full((len(logged), len(steps)), np.nan)
    for row, (at, values) in zip(table, logged, strict=True):
        shown = np.isin(at, steps)
        row[np.searchsorted(steps, at[shown])] = values[shown]
    known = np.ma.masked_where(np.isnan(table), table)
    drawn = {"mean": known.mean(axis=0), "low": known.min(axis=0), "high": known.max(axis=0)}
    return {
        **{"stage": stage, "metric": metric, "arm": arm, "steps": tuple(steps.tolist())},
        **{name: _plain(values.filled(np.nan)) for name, values in drawn.items()},
    }


def _plain(values: Floats) -> tuple[float | None, ...]:
    """Numbers with six digits, None if not finite, to limit a page's size."""
    return tuple(float(f"{v:.6g}") if v - v == 0 else None for v in values.tolist())


def make_attempts(groups: Sequence[Group]) -> Iterator[Row]:
    """Outcomes of agents' attempts, per arm and domain, summed over seeds; errors of the
    infrastructure are separate from failures of the model."""
    for group in groups:
        for arm in () if group.reward else group.arms:
            by_domain: dict[str, list[Mapping[str, Any]]] = {}
            for seed in group.seeds_of(arm):
                told = group.cells[arm, seed].episodes.get("domains") or {}
                for domain, counts in told.items():
                    by_domain.setdefault(domain, []).append(counts)
            for domain, found in by_domain.items():
                yield {
                    **{"arm": arm, "model": group.model, "decoding": group.decoding},
                    **{"protocol": group.name, "domain": domain},
                    "tasks": max(int(counts["tasks"]) for counts in found),
                    **{n: sum(int(counts[n]) for counts in found) for n in ("asked", "passed")},
                    **{n: summed(counts[n] for counts in found) for n in ("failures", "errors")},
                }


def make_monitors(evidence: SweepEvidence) -> tuple[Row, ...]:
    """A row for each arm with a monitor: means over its finished trials.

    Arms are comparable if they have the same gold protocols and rows; others have no numbers.
    ``at`` is the last step at which all trials were looked at.
    """
    found = {t.place: t.monitor for t in evidence.trials if t.monitor}
    if not found:
        return ()
    steps = [set(dict(monitor["gold"])) for monitor in found.values()]
    at = max(set.intersection(*steps), default=None)
    alike = len({(tuple(m["golds"]), m["rows"]) for m in found.values()}) == 1
    arms = dict.fromkeys(arm for arm, _ in found)
    return tuple(
        _monitor_row(arm, [m for p, m in found.items() if p[0] == arm], at, alike) for arm in arms
    )


def _monitor_row(
    arm: str, monitors: Sequence[Mapping[str, Any]], at: int | None, alike: bool
) -> Row:
    known = monitors if alike else ()
    return {
        **{"arm": arm, "trials": len(monitors), "at": at},
        "stopped": [m["stopped"] for m in monitors if m["stopped"] is not None],
        "alarms": [m["alarm"] for m in monitors if m["alarm"] is not None],
        **_monitor_means("equal", [(m, at) for m in known]),
        **_monitor_means("end", [(m, m["gold"][-1][0]) for m in known]),
        **_monitor_means("best", [(m, m["best"]) for m in known]),
    }


def _monitor_means(
    when: str, looks: Sequence[tuple[Mapping[str, Any], int | None]]
) -> dict[str, float | None]:
    """Mean proxy and gold of monitors, each at a step."""
    found: dict[str, float | None] = {}
    for name in ("proxy", "gold"):
        values = [dict(m[name])[step] for m, step in looks if step in dict(m[name])]
        found[f"{name}_{when}"] = sum(values) / len(values) if values else None
    return found


POWER = 0.8


def make_report(evidence: SweepEvidence) -> SweepReport:
    """All comparisons of a sweep, with the other parts of its report."""
    sweep = evidence.sweep
    groups = make_groups(evidence)
    chosen, metric, problems = choose_primary(evidence, groups)
    comparisons: list[Comparison] = []
    for group in groups:
        setting, missing = _setting(evidence, group, groups)
        wanted = metric if group is chosen else ""
        comparisons += compare_group(group, setting, missing, primary=wanted)
    matrix = tuple(make_matrix(evidence, chosen, comparisons)) if chosen else ()
    comparisons.sort(key=lambda c: not c.primary)
    flips = make_flips(evidence, chosen, metric) if chosen else ()
    return SweepReport(
        version=REPORT_VERSION,
        sweep=sweep.name,
        title=sweep.name,
        question=str(sweep.question.get("text") or ""),
        made_at=evidence.made_at,
        state=evidence.state,
        recipe=sweep.recipe,
        baseline=sweep.baseline,
        arms=tuple(arm.name for arm in sweep.arms),
        seeds=sweep.seeds,
        factors=_factors(evidence),
        arm_levels={arm.name: dict(arm.levels) for arm in sweep.arms},
        trials=tuple(trial.row for trial in evidence.trials),
        comparisons=tuple(comparisons),
        curves=make_curves(evidence),
        matrix=matrix,
        rubrics=make_rubrics(evidence, chosen, _changes(comparisons)) if chosen else (),
        flips=flips,
        side_by_side=make_side_by_side(evidence, chosen, flips) if chosen else (),
        attempts=tuple(make_attempts(groups)),
        people=evidence.people,
        monitors=make_monitors(evidence),
        incidents=evidence.incidents,
        protocols=_protocols(evidence, groups),
        provenance=evidence.provenance,
        forecast=sweep.forecast,
        warnings=(*evidence.warnings, *problems, *_warnings(evidence, groups)),
        detectable=_detectable(evidence, chosen, metric),
    )


def _changes(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Arm -> its difference on the sweep's question."""
    primary = (c for c in comparisons if c.primary)
    return {n.arm: n.difference for c in primary for n in c.numbers if n.difference is not None}


# ---------------------------------------------------------------- the sweep's question


def choose_primary(
    evidence: SweepEvidence, groups: Sequence[Group]
) -> tuple[Group | None, str, tuple[str, ...]]:
    """The group and the metric that answer the sweep's question, and its problems.

    Defaults of an incomplete question: the last trained model, the ``sampled`` decoding if
    there is one, ``oracle`` for answers with ground truth and else ``rubric_score`` (for
    agents ``pass@1``); the protocol with the most arms measured beside the baseline.
    """
    asked = evidence.sweep.question
    wanted = {k: str(asked.get(k) or "") for k in ("model", "decoding", "metric", "protocol")}
    model = wanted["model"] or _last_model(evidence, groups)
    fitting = [g for g in groups if g.model == model and evidence.sweep.baseline in g.arms]
    if wanted["decoding"]:
        fitting = [g for g in fitting if g.decoding == wanted["decoding"]]
    if wanted["protocol"]:
        named = [g for g in fitting if wanted["protocol"] in g.protocol_files]
        if not named and "measured_as" in asked:
            named = [g for g in fitting if asked["measured_as"] in g.protocol_files]
        fitting = named
    metric = wanted["metric"]
    if not metric:
        known = {m for g in fitting for m in g.metrics}
        usual = ("oracle", "pass@1", "rubric_score")
        metric = next((m for m in usual if m in known), usual[-1])
    fitting = [g for g in fitting if metric in g.metrics]
    if not fitting:
        if not groups:
            return None, "", ()
        text = " ".join(filter(None, (model, wanted["protocol"], wanted["decoding"], metric)))
        return None, "", (f"Nothing answers the sweep's question: no evaluation has {text}.",)
    best = max(
        fitting, key=lambda g: (len(g.arms), g.decoding == "sampled", bool(g.protocol_files - {""}))
    )
    return best, metric, ()


def _last_model(evidence: SweepEvidence, groups: Sequence[Group]) -> str:
    """The last trained model that was evaluated."""
    found = {g.model for g in groups}
    trained = {name for trial in evidence.trials[:1] for name in trial.stages}
    # Records keep stages by name, not in the order of training.
    order = [name for name in MODELS if name in found]
    order += sorted(name for name in found & trained if name not in MODELS)
    return order[-1] if order else next(iter(g.model for g in reversed(groups)), "")


def _detectable(evidence: SweepEvidence, chosen: Group | None, metric: str) -> dict[str, Any]:
    """The smallest effect that the primary comparison could detect, from its spread."""
    found: dict[str, Any] = {"power": POWER, "alpha": ALPHA}
    wanted = evidence.sweep.question.get("smallest_effect")
    if isinstance(wanted, int | float):
        found["smallest_effect"] = float(wanted)
    if planned := evidence.sweep.forecast.get("detectable"):
        found["planned"] = planned
    if chosen is None:
        return found
    every = paired_layouts(chosen, metric, evidence.sweep.baseline).values()
    layouts = [v for v in every if (~np.isnan(v).any(axis=0)).sum() >= 2]
    if not layouts:
        return {**found, "note": "not known: no arm can be compared with the baseline yet"}
    components = mean_components([variance_components(values) for values in layouts])
    *_, seeds, prompts = components
    several = len(layouts)
    return {
        **found,
        "metric": metric,
        "effect": detectable_effect(components, seeds, prompts, POWER, ALPHA / several),
        "seeds": seeds,
        "prompts": prompts,
        "components": components._asdict(),
        "basis": f"how far its seeds and prompts are apart, {counted(seeds, 'seed')}, "
        f"{prompts} prompts, {counted(several, 'arm')} against the baseline",
    }


# ---------------------------------------------------------------- what is missing


def _setting(
    evidence: SweepEvidence, group: Group, groups: Sequence[Group]
) -> tuple[ComparisonSetting, tuple[str, ...]]:
    """Parameters of a group's comparisons, and the arms without any measurement, which are
    reported as missing beside the baseline."""
    sweep = evidence.sweep
    arms = tuple(arm.name for arm in sweep.arms)
    beside = [g for g in groups if (g.model, g.decoding) == (group.model, group.decoding)]
    measured = {arm for g in beside if g.reward == group.reward for arm in g.arms}
    missing = tuple(a for a in arms if a not in measured) if sweep.baseline in group.arms else ()
    shown = {*group.arms, *missing}
    absent = {
        trial.place: _why_absent(trial, group)
        for trial in evidence.trials
        if trial.row["arm"] in shown and trial.place not in group.cells
    }
    return ComparisonSetting(sweep.baseline, arms, sweep.seeds, absent), missing


def _why_absent(trial: TrialEvidence, group: Group) -> str:
    row = trial.row
    if row["state"] == "done" and not trial.missing:
        return "it was not measured in this way"
    names = [name for name in trial.missing if f"-{group.model}" in name]
    if row["state"] == "done":  # all its stages are done, but a result was unreadable
        return f"{names[0] if names else 'its evaluation'} is left out: see the warnings"
    what = f"{names[0]} is not done" if names else "it is not done"
    return f"{what}, the trial is {row['state']}" + (f" ({row['reason']})" if row["reason"] else "")


def _warnings(evidence: SweepEvidence, groups: Sequence[Group]) -> list[str]:
    found = []
    if len(evidence.sweep.seeds) == 1:
        found.append(
            "One seed: differences are about these checkpoints. Whether the recipes differ takes "
            "at least three seeds."
        )
    for trial in evidence.trials:
        row = trial.row
        if (stopped := trial.monitor.get("stopped")) is not None:
            found.append(
                f"{row['arm']}, seed {row['seed']}, was stopped by its monitor at step {stopped}: "
                f"it is compared with the weights of step {trial.monitor['best']}."
            )
        if row["state"] == "failed":
            why = f": {row['reason']}" if row["reason"] else ""
            found.append(f"{row['arm']}, seed {row['seed']}, has failed{why}.")
    last = _last_model(evidence, groups)
    own = [g for g in groups if g.model == last and not g.reward]
    arms = {a for g in own for a in g.arms}
    if own and len(arms) > 1 and not any(set(g.arms) == arms for g in own):
        found.append(
            "No protocol is common to all arms: their judge or rubrics differ, and with them what "
            "their own numbers mean. Name a protocol file in `evaluate.protocols`, and run it "
            "again: only these evaluations are added."
        )
    return found


# ---------------------------------------------------------------- other parts


def _factors(evidence: SweepEvidence) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for arm in evidence.sweep.arms:
        for factor, label in arm.levels.items():
            found.setdefault(factor, {})[str(label)] = None
    return {factor: tuple(labels) for factor, labels in found.items()}


def _protocols(evidence: SweepEvidence, groups: Sequence[Group]) -> dict[str, Mapping[str, Any]]:
    """Protocols of the shown numbers, by fingerprint."""
    found: dict[str, Mapping[str, Any]] = {}
    for group in groups:
        spelt = evidence.protocols.get(group.protocol, {})
        found[group.protocol] = {"name": group.name, "judged by": group.judge, **spelt}
    return found
