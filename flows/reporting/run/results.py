"""Results of a run: metrics of evaluations, changes by training, curves, examples.

In: a :class:`~flows.reporting.run.stages.RunReading`. Out: :class:`ModelEvaluation` (a finished,
readable evaluation), rows of metrics and changes, curves and examples. Metrics are the recorded
ones; changes are computed from the samples, and left out without them. A value that is not finite
is a gap in its curve; long curves are thinned so that spikes and gaps remain.

Examples are the prompts whose answers improved most, got worse most, and changed typically, and the
best, a typical and the worst sample of the last step. A reward is split by the formula of
:mod:`refiner_core.rewards.combine`; if the parts do not add up to the recorded reward, they have no
shares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from flows.reporting.run.stages import RunReading
from flows.reporting.samples import SamplesReader, questions_of
from flows.stored import TRAINED_ON, newest_metrics, newest_rollouts, part_of_file, sample_name
from infra.orchestrator.timeline import StageHistory
from infra.store.traces import MetricsLine, read_rollouts
from refiner_core.contract.config import RewardConfig
from refiner_core.contract.kinds import MODELS, TRAINED, model_order
from refiner_core.contract.protocols import protocol_name
from refiner_core.contract.records import mapped
from refiner_core.evaluation.metric_names import base_of
from refiner_core.evaluation.metrics import EPISODE_METRICS, METRICS, higher_is_better
from refiner_core.evaluation.results import compare_results, load_results
from refiner_core.report.drawing import kept_indices
from refiner_core.report.printing import finite
from refiner_core.report.run.rendering import MONITOR
from refiner_core.report.run.run_report import Row
from refiner_core.report.sweep.comparing import SHOWN
from refiner_core.rewards.combine import F1_SHARE, FORMAT_SHARE, reward_terms


@dataclass(frozen=True)
class ModelEvaluation:
    """One evaluation: its model, and its protocol file (empty: the recipe's settings)."""

    name: str
    stage_id: str
    attempt: int
    model: str
    under: str
    folder: Path
    report: Mapping[str, Any]

    @property
    def whole(self) -> bool:
        """True for the final model of a training, False for an intermediate checkpoint."""
        return self.model in MODELS


def evaluations_of_run(reading: RunReading) -> list[ModelEvaluation]:
    """The finished evaluations: without a protocol file first, models in the order of training."""
    found = [
        reading.tried(f"The numbers of {name}", _evaluated, reading, name)
        for name, _ in reading.of_kind("evaluate")
    ]
    known = [evaluated for evaluated in found if evaluated is not None]
    return sorted(known, key=lambda e: (e.under, model_order(e.model)))


def _evaluated(reading: RunReading, name: str) -> ModelEvaluation | None:
    """An evaluation; None if it is not done."""
    stage_id, result, folder = reading.run.stages[name], reading.result(name), reading.output(name)
    if result is None or folder is None:
        return None
    report = result.report if "evaluations" in result.report else load_results(folder)
    model, under = str(report["model"]), protocol_name(name)
    return ModelEvaluation(name, stage_id, result.attempt, model, under, folder, report)


# ---------------------------------------------------------------- numbers


def number_rows(
    evaluations: Sequence[ModelEvaluation], people: Sequence[Mapping[str, Any]] = ()
) -> tuple[Row, ...]:
    """Every metric, models in the order of training, then the reference values, once; ``people``
    are means corrected by people's labels."""
    rows = [_number(e, entry) for e in evaluations for entry in e.report["evaluations"]]
    rows += [
        _number(e, entry)
        for e in evaluations
        for entry in people
        if entry["evaluation"] == e.stage_id
    ]
    beside: dict[tuple[str, ...], Row] = {}
    for evaluated in evaluations:
        for entry in evaluated.report.get("reference") or ():
            row = _number(evaluated, entry, reference=True)
            beside[row["model"], row["under"], row["decoding"], row["metric"]] = row
    return (*rows, *beside.values())


def _number(
    evaluated: ModelEvaluation, entry: Mapping[str, Any], *, reference: bool = False
) -> Row:
    names = ("protocol", "decoding", "metric", "value", "low", "high", "n")
    return {
        **{name: entry.get(name) for name in names},
        "protocol_name": str(entry.get("protocol_name") or ""),
        "model": str(entry["stage"]) if reference else evaluated.model,
        "higher_is_better": higher_is_better(str(entry["metric"])),
        "under": evaluated.under,
        "reference": reference,
    }


# ---------------------------------------------------------------- changes


def before_and_after(
    evaluations: Sequence[ModelEvaluation],
) -> list[tuple[ModelEvaluation, ModelEvaluation]]:
    """Pairs to compare per protocol: the first trained model (the base, if only one is trained) and
    the last; then each model and its predecessor."""
    pairs = []
    for under in dict.fromkeys(e.under for e in evaluations):
        models = [e for e in evaluations if e.under == under and e.whole]
        trained = [e for e in models if e.model != MODELS[0]]
        chain = trained if len(trained) > 1 else models
        if len(chain) < 2:
            continue
        pairs.append((chain[0], chain[-1]))
        if len(chain) > 2:
            pairs += pairwise(chain)
    return pairs


def change_rows(reading: RunReading, evaluations: Sequence[ModelEvaluation]) -> tuple[Row, ...]:
    """Changes by training, metric by metric, without those of single domains."""
    rows: list[Row] = []
    for before, after in before_and_after(evaluations):
        found = reading.tried(
            f"The difference of {after.name} and {before.name}",
            compare_results,
            [after.folder],
            [before.folder],
            metrics=_shared(after, before),
        )
        rows += [_change(before, after, one) for one in found or ()]
    return tuple(rows)


def _shared(after: ModelEvaluation, before: ModelEvaluation) -> list[str]:
    """Metrics that both have under one protocol, over all domains."""
    one, other = (
        {(e["decoding"], e["metric"]): e["protocol"] for e in side.report["evaluations"]}
        for side in (after, before)
    )
    apart = {key[1] for key in one if one[key] != other.get(key)}
    return sorted({m for _, m in one if m not in apart and base_of(m) == m})


def _change(before: ModelEvaluation, after: ModelEvaluation, found: Mapping[str, Any]) -> Row:
    return {
        **{"before": before.model, "after": after.model, "under": before.under},
        **{n: found[n] for n in ("decoding", "metric", "difference", "low", "high", "n")},
        **{"value_before": found["b"], "value_after": found["a"]},
        "higher_is_better": higher_is_better(str(found["metric"])),
    }


#: Further curves of a run, if a stage logs them; for agents the course of episodes.
_ALSO = (
    *("episodes/success", "episodes/partial", "episodes/turns"),
    *("policy/entropy_avg", "grad_norm", "learning_rate"),
    *("quality/claims", "quality/cited_share", "quality/copied_share", "quality/outside_share"),
    *("quality/repeated_share", "quality/saturated", "quality/unusable_judgements"),
    *("monitor/proxy", "monitor/gold", "monitor/e_value", "monitor/alarm"),
)
#: Metrics of an external trainer, which has its own names.
_MOST_FOREIGN = 12
MOST_POINTS = 400
#: A metric with values at more than this share of steps is expected at every step.
_DENSE = 0.5

Points = tuple[tuple[int, ...], tuple[float | None, ...]]


def training_curves(reading: RunReading) -> tuple[Row, ...]:
    """Curves of all training stages, in the order of work."""
    found: list[Row] = []
    for name, history in reading.of_kind(*TRAINED):
        foreign = history.record.spec.kind == "command"
        only = None if foreign else (*SHOWN, *_ALSO)
        what = f"The metrics of {name}"
        where = (reading.workspace, history.stage_id, only)
        lines = reading.tried(what, newest_metrics, *where) or []
        taken_over = [
            a.resumed_from_step
            for a in history.record.attempts
            if a.resumed_from_step is not None and a.started_at is not None
        ]
        for metric, (steps, values) in points_of(lines, foreign=foreign).items():
            began = tuple(s for s in taken_over if steps[0] <= s <= steps[-1])
            logged = {"stage": name, "metric": metric, "steps": steps, "values": values}
            found.append({**logged, "from_attempts": began})
    return tuple(found)


def monitor_words(reading: RunReading) -> list[str]:
    """A sentence for each GRPO stage whose monitor has raised its alarm."""
    found = []
    for name, _ in reading.of_kind("grpo"):
        result = reading.result(name)
        if result is not None and result.report.get("monitor") and result.report.get("remark"):
            found.append(f"{name}: {result.report['remark']}.")
    return found


def points_of(lines: Sequence[MetricsLine], *, foreign: bool = False) -> dict[str, Points]:
    """Steps and values by metric; a step's later line replaces an earlier one."""
    logged: dict[str, dict[int, float | None]] = {}
    for step, metrics in lines:
        for metric, value in metrics.items():
            known = finite(value)
            logged.setdefault(metric, {})[step] = None if known is None else float(f"{known:.6g}")
    shown = list(logged)[:_MOST_FOREIGN] if foreign else (*SHOWN, *_ALSO)
    names = [metric for metric in shown if metric in logged]
    steps = sorted({step for metric in names for step in logged[metric]})
    return {
        # A monitor has no numbers between its looks.
        metric: _with_gaps(
            logged[metric], sorted(logged[metric]) if metric.startswith(MONITOR) else steps
        )
        for metric in names
        if any(value is not None for value in logged[metric].values())
    }


def _with_gaps(points: Mapping[int, float | None], steps: Sequence[int]) -> Points:
    """Points within the metric's own range, with gaps if it is logged at most steps; long curves
    are thinned to their extremes."""
    first, last = min(points), max(points)
    inside = [s for s in steps if first <= s <= last]
    kept = inside if len(points) > _DENSE * len(inside) else sorted(points)
    places = kept_indices([points.get(step) for step in kept], MOST_POINTS)
    return tuple(kept[i] for i in places), tuple(points.get(kept[i]) for i in places)


#: Maximum length of an answer, of a prompt, and of each text of an episode or judgement, in
#: characters.
MOST_OF_ANSWER, MOST_OF_PROMPT, MOST_OF_TURN, MOST_OF_JUDGEMENT = 12_000, 24_000, 4_000, 1_500
_CUT = " […]"
_NEAR = 1e-6


def text_in_evaluation(row: Mapping[str, Any], model: str, reward: RewardConfig) -> Row:
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


def text_in_training(row: Mapping[str, Any], reward: RewardConfig) -> Row:
    """One rollout, with the step in which it was sampled."""
    mine = (key for key in row if key.startswith("reward/"))
    components = {key.removeprefix("reward/"): row[key] for key in mine}
    parts = _episode_parts(row, components) if "episode" in row else _parts(row, components, reward)
    of_parts = {"total", *(part["name"] for part in parts)}
    metrics = {k: v for k, v in components.items() if v is not None and k not in of_parts}
    if row.get("advantage") is not None:
        metrics["advantage"] = row["advantage"]
    return _said(row, f"step {row['step']}", metrics, parts)


def _said(
    row: Mapping[str, Any], model: str, metrics: Mapping[str, float | None], parts: Sequence[Row]
) -> Row:
    stored = row.get("judgements")  # as text in files, else as objects
    judgements = (json.loads(stored) if isinstance(stored, str) else stored) or []
    episode = None
    if row.get("episode"):
        recorded = json.loads(row["episode"])
        # Failures have a column in samples files; rollouts have them in the record itself.
        failure = row["failure"] or None if "failure" in row else recorded.get("failure")
        episode = clipped({**recorded, "failure": failure}, MOST_OF_TURN)
    return {
        "model": model,
        "text": "" if episode is not None else clip(str(row["response_text"]), MOST_OF_ANSWER),
        "status": str(row.get("status") or ""),
        "finish_reason": str(row.get("finish_reason") or ""),
        "reward": finite(row.get("reward")),
        "parts": tuple(parts),
        "judgements": tuple(clipped(j, MOST_OF_JUDGEMENT) for j in judgements),
        "metrics": {k: finite(v) for k, v in metrics.items()},
        "episode": episode,
        "failed": _failed(row, judgements, episode),
    }


def _failed(
    row: Mapping[str, Any],
    judgements: Sequence[Mapping[str, Any]],
    episode: Mapping[str, Any] | None,
) -> str:
    """Reason for a missing reward, or for an episode's failure; empty without one."""
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
) -> tuple[Row, ...]:
    """Terms of the reward, with the weights of the total."""
    total = finite(row.get("reward"))
    if reward.non_stop_penalty and row.get("finish_reason") != "stop":
        value = reward.non_stop_penalty_value
        return (_part("did not stop", 1.0, value),)
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
) -> tuple[Row, ...]:
    """The environment's own reward, and partial credit by its weight."""
    counts = row.get("status") == "scored"  # other episodes have a reward by rule
    alpha = components.get("alpha") or 0.0
    parts = [_part("reward", components.get("reward"), 1.0 if counts else 0.0)]
    if components.get("partial") is not None:
        parts.append(_part("partial", components["partial"], alpha if counts else 0.0))
    return _checked(parts, finite(row.get("reward")))


def _part(name: str, value: float | None, weight: float) -> Row:
    value, weighs = finite(value), finite(weight)
    share = None if value is None or weighs is None else value * weighs
    return {"name": name, "value": value, "weight": weighs, "share": share}


def _checked(parts: Sequence[Row], total: float | None) -> tuple[Row, ...]:
    """Shares only if they add up to the recorded reward."""
    shares = math.fsum(part["share"] or 0.0 for part in parts)
    if total is not None and abs(shares - total) <= _NEAR * max(1.0, abs(total)):
        return tuple(parts)
    return tuple({**part, "weight": None, "share": None} for part in parts)


# ---------------------------------------------------------------- long texts


def clip(text: str, most: int) -> str:
    """The beginning of a long text."""
    return text if len(text) <= most else text[:most] + _CUT


def clipped(value: Any, most: int) -> Any:
    """JSON whose long texts are cut; numbers that are not finite are None."""

    def leaf(one: Any) -> Any:
        if isinstance(one, str):
            return clip(one, most)
        return finite(one) if isinstance(one, float) else one

    return mapped(value, leaf)


#: Number of examples of each kind, and the smallest change that counts.
_BETTER, _WORSE, _TYPICAL = 3, 3, 2
_NO_CHANGE = 1e-9
_METRICS = ("success", "reward", "oracle", "rubric_score")


def evaluation_examples(
    reading: RunReading, evaluations: Sequence[ModelEvaluation]
) -> tuple[Row, ...]:
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


def choose(changes: Mapping[str, float]) -> dict[str, str]:
    """Prompts to show, by their changes, and the reason for each."""
    order = sorted(changes, key=lambda p: (changes[p], p))
    better = [p for p in reversed(order) if changes[p] > _NO_CHANGE][:_BETTER]
    worse = [p for p in order if changes[p] < -_NO_CHANGE][:_WORSE]
    rest = [p for p in order if p not in {*better, *worse}]
    middle = median(changes.values()) if changes else 0.0
    rest.sort(key=lambda p: (abs(changes[p] - middle), p))
    why = [("improved most", better), ("got worse most", worse), ("typical", rest[:_TYPICAL])]
    return {p: word for word, prompts in why for p in prompts}


def _before_and_after(reading: RunReading, shown: Sequence[ModelEvaluation]) -> tuple[Row, ...]:
    reader = SamplesReader()
    files = _sample_files(shown)
    if not files:
        return ()
    ends = ((shown[0], files[0]), (shown[-1], files[-1]))
    means = [reader.means(one.folder / file) for one, file in ends]
    metric = next((m for m in _METRICS if all(m in mean.metrics for mean in means)), None)
    if metric is None:
        return ()
    was, is_now = (pd.Series(mean.of(metric), mean.prompts) for mean in means)
    changes = (is_now - was).dropna().to_dict()
    chosen = choose(changes)
    prompts = list(chosen)
    answers = []
    for evaluated, file in zip(shown, files, strict=True):
        reward = reading.config_of(evaluated.name).reward
        rows = reader.rows(evaluated.folder / file, prompts)
        first = {str(row["sample_id"]): row for row in reversed(rows)}
        said = partial(text_in_evaluation, model=evaluated.model, reward=reward)
        part = (evaluated.name, part_of_file(file))
        answers.append(
            {p: {**said(row), "sample": sample_name(*part, row)} for p, row in first.items()}
        )
    where = (reading.workspace, shown[-1].stage_id, shown[-1].attempt)
    asked = reading.tried("The prompts of evaluations", questions_of, *where, prompts)
    if prompts and asked == {}:
        reading.warnings.append("The prompts of evaluations are not there any more.")
    return tuple(
        _example(
            asked or {},
            prompt,
            kind="before and after",
            why=why,
            said=tuple(by[prompt] for by in answers if prompt in by),
            metric=metric,
            change=float(f"{changes[prompt]:.6g}"),
        )
        for prompt, why in chosen.items()
    )


def _example(asked: Mapping[str, Row], sample_id: str, **more: Any) -> Row:
    known = asked.get(sample_id) or {"question": "", "prompt": ""}
    prompt = clip(known["prompt"], MOST_OF_PROMPT)
    return {"sample_id": sample_id, "question": known["question"], "prompt": prompt, **more}


def _sample_files(shown: Sequence[ModelEvaluation]) -> list[str]:
    """Samples file of each, all with one decoding: greedy if all have it."""
    found = [
        {str(e["decoding"]): str(e["samples_file"]) for e in one.report["evaluations"]}
        for one in shown
    ]
    shared = [d for d in found[0] if all(d in files for files in found)]
    if not shared:
        return []
    decoding = "greedy" if "greedy" in shared else shared[0]
    return [files[decoding] for files in found]


#: Large columns that are not needed here.
_BULK = ("response_ids", "logprobs", "own", "turn_advantages")


def rollout_examples(reading: RunReading) -> tuple[Row, ...]:
    """Rollouts of the run's last GRPO stage with any."""
    found: tuple[Row, ...] = ()
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
) -> tuple[Row, ...]:
    reward = reading.config_of(name).reward
    last = read_rollouts(files[max(files)], _BULK)
    shown = list(_of_one_step(last))
    prompts = list(dict.fromkeys(str(row["sample_id"]) for _, row in shown))
    where = (reading.workspace, history.stage_id, history.record.attempts[-1].number)
    asked = reading.tried(f"The prompts of {name}", questions_of, *where, prompts, TRAINED_ON)
    return tuple(
        _example(
            asked or {},
            str(row["sample_id"]),
            kind="rollout",
            why=why,
            said=(
                {**text_in_training(row, reward), "sample": sample_name(name, row["step"], row)},
            ),
            metric="reward",
            change=None,
        )
        for why, row in shown
    )


# ---------------------------------------------------------------- selection


def _of_one_step(rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """The best, a typical and the worst sample, and one without a score, if they exist."""
    scored = sorted((r for r in rows if r.get("reward") is not None), key=_worth)
    if scored:
        yield "best", scored[-1]
    if len(scored) > 2:
        yield "typical", scored[(len(scored) - 1) // 2]
    if len(scored) > 1:
        yield "worst", scored[0]
    unscored = next((r for r in rows if r.get("reward") is None), None)
    if unscored is not None:
        yield "no score", unscored


def _worth(row: Row) -> tuple[float, str, int]:
    return float(row["reward"]), str(row["sample_id"]), int(row["sample_index"])
