"""Explanation of a number: samples, one answer in full, judgements, files.

In: a :class:`~flows.why.figures.Figure` and the workspace that it was recorded in. Out: an
:class:`Explanation`, for a terminal of 100 columns and as JSON. The number is computed again from
its samples; what has been deleted since is said, not left out.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flows.stored import HELD_OUT, TRAINED_ON, attempts_of, prompts_of
from flows.why.figures import FLOORS, Figure, words_apart
from infra.store.checkpoints import step_name
from infra.store.layout import AttemptPaths
from infra.store.traces import read_rollouts
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.records import from_json
from refiner_core.contract.types import PromptRow
from refiner_core.data.prepared import load_prompts
from refiner_core.evaluation.metrics import load_samples, of_tasks
from refiner_core.evaluation.results import RESULTS_FILE, recompute
from refiner_core.evaluation.statistics import Estimate

_FEW = 3

Row = Mapping[str, Any]


class SampleValue(NamedTuple):
    """One sample and its part of the number; ``value`` None is one that does not count."""

    sample_id: str
    number: int
    value: float | None

    @property
    def name(self) -> str:
        """By which ``--sample`` knows it."""
        return f"{self.sample_id}#{self.number}"


@dataclass(frozen=True)
class Sample:
    """One sample in full.

    Attributes
    ----------
    scores
        Every metric or reward component of it, by name.
    judgements
        What was asked of the judge and what it said, as stored.
    """

    which: SampleValue
    question: str
    prompt: str
    answer: str
    status: str
    finish_reason: str
    scores: Mapping[str, float | None]
    judgements: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Explanation:
    """Everything behind a number.

    Attributes
    ----------
    recomputed
        The number from its samples; None where they are not there or it is no mean of samples.
    agrees
        Whether that is what is recorded, interval included.
    values
        All samples, lowest first; those that do not count last.
    sample
        The one that was asked for, else the most typical.
    files
        What lies where, in words -> path.
    notes
        What could not be shown, and why.
    """

    figure: Figure
    recomputed: Estimate | None = None
    agrees: bool | None = None
    values: tuple[SampleValue, ...] = ()
    sample: Sample | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def counted(self) -> list[SampleValue]:
        """The samples that count, lowest first."""
        return [v for v in self.values if v.value is not None]

    def picked(self) -> dict[str, list[SampleValue]]:
        """A few of the lowest, of the most typical and of the highest, none of them twice."""
        counted = self.counted
        if len(counted) <= 3 * _FEW:
            return {"all": counted}
        middle = (len(counted) - _FEW) // 2
        return {
            "lowest": counted[:_FEW],
            "typical": counted[middle : middle + _FEW],
            "highest": counted[-_FEW:],
        }


def explain_number(
    figure: Figure, workspace: str | Path = RecipeConfig.workspace, *, sample: str | None = None
) -> Explanation:
    """What a number was made of: its protocol, samples, answers and judgements.

    Parameters
    ----------
    figure
        One of :func:`flows.api.find_numbers`.
    workspace
        The folder that its records lie in.
    sample
        The sample to show in full (default: a typical one).

    Returns
    -------
    Explanation
        With the files that all of it lies in.

    Raises
    ------
    ConfigurationError
        There is no such sample.
    DataError
        The samples are damaged.
    """
    room = Workspace.read_only(workspace)
    there = room if room.stage_ids() else None  # else nobody knows where it was recorded
    record = there.read_record(figure.stage_id) if there and figure.stage_id else None
    if there is None or record is None:
        return Explanation(figure, notes=(_elsewhere(figure, there),))
    files = {"record": str(there.root / figure.record.partition("#")[0])}
    if figure.kind == "evaluation":
        return _of_evaluation(figure, there, files, sample)
    if figure.kind == "training":
        return _of_training(figure, there, files, sample)
    return Explanation(figure, files=files)


def _elsewhere(figure: Figure, workspace: Workspace | None) -> str:
    if not figure.record:
        return "Nobody has said where this was recorded."
    there = "no workspace was given" if workspace is None else f"{workspace.root} does not have it"
    return (
        f"It was recorded in {figure.record}, and {there}: name the run's own with workspace=DIR "
        "to see the samples behind it."
    )


# ---------------------------------------------------------------- evaluations


def _of_evaluation(
    figure: Figure, workspace: Workspace, files: dict[str, str], wanted: str | None
) -> Explanation:
    result = workspace.read_result(figure.stage_id)
    assert result is not None, "an evaluation's numbers are in its result"
    folder = workspace.layout.stage(figure.stage_id).data / result.output_dir
    paths = workspace.layout.attempt(figure.stage_id, result.attempt)
    # The evidence of a card does not have the file's name.
    which = figure.model if figure.model in FLOORS else figure.decoding
    samples = folder / str(figure.entry.get("samples_file") or f"samples-{which}.parquet")
    files |= {"results": str(folder / RESULTS_FILE), "samples": str(samples)}
    prompts, notes = _prompts(workspace, paths, HELD_OUT, files)
    try:
        rows = load_samples(samples)
    except DataError as error:
        return Explanation(figure, files=files, notes=(*notes, str(error)))
    config = from_json(RecipeConfig, workspace.part(paths, "config"))
    again = recompute(rows, figure.metric, config)
    values = _ordered(rows, figure.metric)
    row = _chosen(rows, values, wanted)
    return Explanation(
        figure=figure,
        recomputed=again,
        agrees=again is not None and _same(again, figure.entry),
        values=values,
        sample=None if row is None else _sample(row, figure.metric, _measured(row), prompts),
        files=files,
        notes=notes,
    )


def _same(again: Estimate, entry: Mapping[str, Any]) -> bool:
    return all(_near(value, entry.get(name)) for name, value in again._asdict().items())


def _near(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return abs(one - other) <= 1e-12 * max(1.0, abs(one))
    return bool(one == other)


def _measured(row: Row) -> dict[str, float | None]:
    found = {k: v for k, v in row.items() if v is None or isinstance(v, float)}
    if "episode" not in row:
        return found
    # Of a task's numbers each attempt has but its own part, and that of its domain.
    return {k: v for k, v in found.items() if v is not None and "/" not in k}


# ---------------------------------------------------------------- training


def _of_training(
    figure: Figure, workspace: Workspace, files: dict[str, str], wanted: str | None
) -> Explanation:
    assert figure.step is not None, "a point of a curve has a step"
    paths = list(attempts_of(workspace, figure.stage_id).values())
    name = f"{step_name(figure.step)}.parquet"
    metrics = [p.metrics for p in paths if p.metrics.exists()]
    rollouts = [p.rollouts / name for p in paths if (p.rollouts / name).exists()]
    files |= {"metrics": str(metrics[0])} if metrics else {}
    if not rollouts:
        gone = f"Step {figure.step} has no rollouts that are kept."
        return Explanation(figure, files=files, notes=(gone,))
    files["rollouts"] = str(rollouts[0])
    prompts, notes = _prompts(workspace, paths[0], TRAINED_ON, files)
    rows = read_rollouts(rollouts[0])
    column = _column(figure.metric)
    known = bool(rows) and column in rows[0]
    if not known:
        notes += (f"{figure.metric} is no mean over rollouts; they are shown by their reward.",)
        column = "reward"
    values = _ordered(rows, column)
    row = _chosen(rows, values, wanted)
    mean = _mean(values) if known else None
    return Explanation(
        figure=figure,
        recomputed=mean,
        agrees=None if mean is None else abs(mean.value - figure.value) < 1e-9,
        values=values,
        sample=None if row is None else _sample(row, column, _components(row), prompts),
        files=files,
        notes=notes,
    )


def _column(metric: str) -> str:
    """``objective/citation_f1_reward`` is the mean of ``reward/citation_f1``."""
    if metric == "scores":
        return "reward"
    name = metric.removeprefix("objective/")
    return f"reward/{name.removesuffix('_reward')}" if name != metric else metric


def _mean(values: Sequence[SampleValue]) -> Estimate | None:
    counted = [v.value for v in values if v.value is not None]
    if not counted:
        return None
    total, prompts = sum(counted), {v.sample_id for v in values if v.value is not None}
    mean = total / len(counted)
    return Estimate(mean, None, None, len(prompts), total, len(counted), "none")


def _components(row: Row) -> dict[str, float | None]:
    found = {k.removeprefix("reward/"): v for k, v in row.items() if k.startswith("reward/")}
    return {"reward": row.get("reward"), "advantage": row.get("advantage"), **found}


# ---------------------------------------------------------------- samples


def _value(row: Row, column: str) -> SampleValue:
    value = row.get(column)
    number = float(value) if isinstance(value, int | float) else None
    return SampleValue(str(row["sample_id"]), int(row["sample_index"]), number)


def _ordered(rows: Sequence[Row], column: str) -> tuple[SampleValue, ...]:
    """The samples by their part of a number; those that have none last."""
    values = (_value(row, column) for row in rows)
    return tuple(sorted(values, key=lambda v: (v.value is None, v.value or 0.0, v[:2])))


def _chosen(rows: Sequence[Row], values: Sequence[SampleValue], wanted: str | None) -> Row | None:
    """The row that was asked for, else that of the median."""
    counted = [v for v in values if v.value is not None] or list(values)
    if not counted:
        return None
    which = counted[len(counted) // 2]
    if wanted is not None:
        hits = [v for v in values if wanted in (v.name, v.sample_id)]
        if not hits:
            few = ", ".join(v.name for v in counted[:_FEW])
            raise ConfigurationError(
                f"No sample {wanted!r} is behind this number.",
                expected=f"one of {len(values)}, such as {few}",
                fix="name one of these with --sample",
            )
        which = hits[0]
    return next(r for r in rows if (r["sample_id"], r["sample_index"]) == which[:2])


def _sample(
    row: Row, column: str, scores: Mapping[str, float | None], prompts: Mapping[str, PromptRow]
) -> Sample:
    prompt = prompts.get(str(row["sample_id"]))
    return Sample(
        which=_value(row, column),
        question="" if prompt is None else prompt.question,
        prompt="" if prompt is None else prompt.prompt_text,
        answer=str(row["response_text"]),
        status=str(row["status"]),
        finish_reason=str(row["finish_reason"]),
        scores=scores,
        judgements=json.loads(row["judgements"]),
    )


def _prompts(
    workspace: Workspace, attempt: AttemptPaths, name: str, files: dict[str, str]
) -> tuple[dict[str, PromptRow], tuple[str, ...]]:
    """The prompts that an attempt has read by sample id; none, and why, where they are gone."""
    data, path = prompts_of(workspace, attempt, name)
    if path is None:
        return {}, (f"The prompts ({name} of {data or 'the data stage'}) are not there any more.",)
    files["prompts"] = str(path)
    return {p.sample_id: p for p in load_prompts(path)}, ()


# ---------------------------------------------------------------- for a terminal


#: Version of the JSON that `why --json` prints.
OUTPUT_VERSION = 1
WIDTH = 100
#: Candidates that are listed before the rest is counted.
_LISTED = 30
_CONTENT_LINES = 24

_INTERVALS = {
    "wilson": "Wilson's score interval: yes or no, once a prompt",
    "wilson over prompts": "Wilson's score interval over prompts, as all samples are equal",
    "bootstrap over prompts": "bootstrap over prompts (BCa): prompts are drawn again, not samples",
    "constant": "all samples are equal, so there is no spread to estimate",
    "none": "one prompt leaves no spread to estimate",
}


def one_line(figure: Figure) -> str:
    """A number with what it is: ``0.512 [0.480, 0.543]  citation_f1 of grpo, greedy, n = 64``."""
    if figure.kind == "fact":
        return f"{figure.value:.12g}  {figure.metric}, as it was recorded"
    value = f"{figure.value:.3f}"
    if figure.kind == "training":
        return f"{value}  {figure.metric} of {figure.model} at step {figure.step}, in training"
    interval = f" {_interval(figure.entry)}".rstrip()
    how = f"{figure.decoding}, {figure.under}" if figure.under else figure.decoding
    return (
        f"{value}{interval}  {figure.metric} of {figure.model}, {how}, n = {figure.entry.get('n')}"
    )


def candidate_lines(figures: Sequence[Figure], asked: str) -> Iterator[str]:
    """Several numbers that may be meant, and how to say which."""
    yield f"{asked} is {len(figures)} recorded numbers:"
    yield ""
    apart = words_apart(figures)
    for figure, words in list(zip(figures, apart, strict=True))[:_LISTED]:
        where = f"  {figure.stage_id}" if words[-1] == figure.stage_id else ""
        part = "" if figure.matched == "value" else f"  (the {figure.matched} end of its interval)"
        yield f"  {one_line(figure)}{part}{where}"
    if len(figures) > _LISTED:
        yield f"  … and {len(figures) - _LISTED} more"


def explanation_lines(found: Explanation) -> Iterator[str]:
    """Everything behind one number."""
    figure = found.figure
    yield one_line(figure)
    if figure.matched != "value":
        yield f"({figure.matched} is the end of its interval that you asked for)"
    if figure.kind == "evaluation":
        yield ""
        yield from _protocol_lines(figure)
    yield from _how_lines(found)
    yield from _sample_lists(found)
    if found.sample is not None:
        yield ""
        yield from _sample_lines(found.sample, figure.metric)
    yield ""
    yield from _file_lines(found)


def _interval(entry: Mapping[str, Any]) -> str:
    low, high = entry.get("low"), entry.get("high")
    return "" if low is None or high is None else f"[{low:.3f}, {high:.3f}]"


# ---------------------------------------------------------------- protocol and computation


def _protocol_lines(figure: Figure) -> Iterator[str]:
    entry, protocol = figure.entry, figure.protocol
    yield f"protocol  {entry.get('protocol_name') or entry['protocol']}"
    for name, value in protocol.items():
        if name in ("version", "decoding") or value is None or value == {}:
            continue
        yield from _wrapped(f"  {name:<20}", _in_words(name, value))


def _in_words(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_short(v)}" for k, v in value.items() if v is not None)
    if name in ("data", "prompts"):
        return f"{_short(value)} (SHA-256)"
    return _short(value)


def _short(value: Any) -> str:
    text = str(value)
    digest = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    return f"{text[:12]}…" if digest else text


def _how_lines(found: Explanation) -> Iterator[str]:
    figure, entry, again = found.figure, found.figure.entry, found.recomputed
    if figure.kind == "evaluation":
        yield ""
        if entry.get("numerator") is not None:
            agent = bool(figure.protocol.get("environment"))
            each = "tasks" if of_tasks(figure.metric) else "attempts" if agent else "samples"
            yield (
                f"value     {entry['numerator']:.6g} / {entry.get('denominator')} {each} = "
                f"{figure.value:.6g}, over n = {entry['n']} {'tasks' if agent else 'prompts'}"
            )
        how = _INTERVALS.get(str(entry.get("interval")), str(entry.get("interval")))
        yield from _wrapped("interval  ", f"{_interval(entry) or 'none'}, 95 %: {how}")
    elif again is not None:
        yield ""
        yield (
            f"value     {again.numerator:.6g} / {again.denominator} rollouts = {again.value:.6g}, "
            f"over {again.n} prompts"
        )
    if found.agrees:
        yield "computed  again from the samples: the same"
    elif found.agrees is not None:
        other = "nothing"
        if again is not None:
            other = f"{again.value:.6g} {_interval(again._asdict())}".strip()
        yield f"computed  again from the samples: {other}, which is NOT what is recorded"


# ---------------------------------------------------------------- samples


def _sample_lists(found: Explanation) -> Iterator[str]:
    counted = found.counted
    if not found.values:
        return
    left = 0 if of_tasks(found.figure.metric) else len(found.values) - len(counted)
    more = f" ({left} do not count: nothing was measured)" if left else ""
    yield ""
    yield f"samples   {len(counted)}{more}"
    for label, values in found.picked().items():
        said = ", ".join(f"{v.name} ({_number(v.value)})" for v in values) or "none"
        yield from _wrapped(f"  {label:<8}", said)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _sample_lines(sample: Sample, metric: str) -> Iterator[str]:
    yield f"sample    {sample.which.name}, {metric} {_number(sample.which.value)}"
    if sample.question:
        yield from _wrapped("  question  ", sample.question)
    ending = "" if sample.finish_reason == "stop" else f" (ended by {sample.finish_reason})"
    yield f"  answer    {sample.status}{ending}"
    yield from _block(sample.answer)
    scores = ", ".join(f"{name} {_number(value)}" for name, value in sample.scores.items())
    yield from _wrapped("  scores    ", scores)
    if not sample.judgements:
        yield "  judge     was not asked"
        return
    checks = all(j.get("kind") == "check" for j in sample.judgements)
    yield "  checks" if checks else "  judge"
    for judgement in sample.judgements:
        yield from _judgement_lines(judgement)


def _judgement_lines(judgement: Mapping[str, Any]) -> Iterator[str]:
    score = judgement.get("score")
    number = "failed" if score is None else f"{score:.2f}"
    kind = judgement.get("kind")
    if kind == "check":
        text = str(judgement.get("title"))
        number = "passed" if score else "missing"
    elif kind == "rubric":
        sign = "against" if judgement.get("polarity") == "negative" else "for"
        weight = f"{sign}, weight {judgement.get('weight', 1):g}, {judgement.get('source')}"
        text = f"{judgement.get('title')} ({weight}): {judgement.get('criterion')}"
    else:
        ids = ", ".join(judgement.get("ids") or ()) or "no source"
        text = f"{str(kind).replace('_', ' ')} [{ids}]: {judgement.get('claim')}"
    yield from _wrapped(f"    {number:<7} ", text)
    if judgement.get("detail"):
        yield from _wrapped("            ", f"said: {judgement['detail']}")


def _block(text: str) -> Iterator[str]:
    lines = [
        line
        for paragraph in text.splitlines() or [""]
        for line in textwrap.wrap(paragraph, WIDTH - 6) or [""]
    ]
    for line in lines[:_CONTENT_LINES]:
        yield f"    | {line}"
    if len(lines) > _CONTENT_LINES:
        yield f"    | … {len(lines) - _CONTENT_LINES} more lines"


def _file_lines(found: Explanation) -> Iterator[str]:
    yield "files"
    for name, path in found.files.items():
        yield f"  {name:<9} {path}"
    if found.figure.record:
        yield f"  in record {found.figure.record.partition('#')[2] or 'all of it'}"
    for note in found.notes:
        yield from _wrapped("  note      ", note)


def _wrapped(head: str, text: str) -> Iterator[str]:
    lines = textwrap.wrap(text, WIDTH - len(head), break_long_words=False) or [""]
    yield f"{head}{lines[0]}".rstrip()
    for line in lines[1:]:
        yield " " * len(head) + line


# ---------------------------------------------------------------- JSON


def explanation_json(found: Explanation) -> dict[str, Any]:
    """Everything behind one number, for scripts."""
    sample = found.sample
    return {
        **figure_json(found.figure),
        "recomputed": None if found.recomputed is None else found.recomputed._asdict(),
        "agrees": found.agrees,
        "samples": [v._asdict() for v in found.values],
        "sample": sample and {**asdict(sample), "which": sample.which._asdict()},
        "files": dict(found.files),
        "notes": list(found.notes),
    }


def figure_json(figure: Figure) -> dict[str, Any]:
    """One recorded number, for scripts."""
    return asdict(figure)
