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
from flows.why.figures import Figure, words_apart
from infra.store.checkpoints import step_name
from infra.store.traces import read_rollouts
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.kinds import FLOORS
from refiner_core.contract.records import from_json
from refiner_core.data.prepared import load_prompts
from refiner_core.evaluation.metrics import load_samples, of_tasks
from refiner_core.evaluation.results import RESULTS_FILE, recompute
from refiner_core.evaluation.statistics import Estimate
from refiner_core.report.printing import measured, short

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


@dataclass
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
        The one that was asked for, else the most typical, in full: ``which`` of ``values``,
        ``question``, ``prompt``, ``answer``, ``status``, ``finish_reason``, all ``scores`` by
        name, and ``judgements`` as they are stored.
    files
        What lies where, in words -> path.
    notes
        What could not be shown, and why.
    """

    figure: Figure
    recomputed: Estimate | None = None
    agrees: bool | None = None
    values: tuple[SampleValue, ...] = ()
    sample: Mapping[str, Any] | None = None
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def counted(self) -> list[SampleValue]:
        """The samples that count, lowest first."""
        return [v for v in self.values if v.value is not None]


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
    room, found = Workspace.read_only(workspace), Explanation(figure)
    record = room.read_record(figure.stage_id) if figure.stage_id and room.stage_ids() else None
    if record is None:
        found.notes.append(
            f"It was recorded in {figure.record or 'a place that nobody has named'}, which "
            f"{room.root} does not have: name the run's own with workspace=DIR to see the samples "
            "behind it."
        )
        return found
    found.files["record"] = str(room.root / figure.record.partition("#")[0])
    if figure.kind == "evaluation":
        _explain_evaluation(found, room, sample)
    elif figure.kind == "training":
        _explain_training(found, room, sample)
    return found


def _explain_evaluation(found: Explanation, workspace: Workspace, wanted: str | None) -> None:
    figure = found.figure
    result = workspace.read_result(figure.stage_id)
    assert result is not None, "an evaluation's numbers are in its result"
    folder = workspace.layout.stage(figure.stage_id).data / result.output_dir
    paths = workspace.layout.attempt(figure.stage_id, result.attempt)
    # The evidence of a card does not have the file's name.
    which = figure.model if figure.model in FLOORS else figure.decoding
    samples = folder / str(figure.entry.get("samples_file") or f"samples-{which}.parquet")
    found.files |= {"results": str(folder / RESULTS_FILE), "samples": str(samples)}
    try:
        rows = load_samples(samples)
    except DataError as error:
        found.notes.append(str(error))
        return
    again = recompute(rows, figure.metric, from_json(RecipeConfig, workspace.part(paths, "config")))
    found.recomputed = again
    found.agrees = again is not None and all(
        _near(value, figure.entry.get(name)) for name, value in again._asdict().items()
    )
    _add_samples(found, rows, figure.metric, prompts_of(workspace, paths, HELD_OUT), wanted)


def _near(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return abs(one - other) <= 1e-12 * max(1.0, abs(one))
    return bool(one == other)


def _explain_training(found: Explanation, workspace: Workspace, wanted: str | None) -> None:
    figure = found.figure
    assert figure.step is not None, "a point of a curve has a step"
    paths = list(attempts_of(workspace, figure.stage_id).values())
    name = f"{step_name(figure.step)}.parquet"
    for what, files in (
        ("metrics", (p.metrics for p in paths)),
        ("rollouts", (p.rollouts / name for p in paths)),
    ):
        for path in [p for p in files if p.exists()][:1]:
            found.files[what] = str(path)
    if "rollouts" not in found.files:
        found.notes.append(f"Step {figure.step} has no rollouts that are kept.")
        return
    rows = read_rollouts(Path(found.files["rollouts"]))
    # `objective/citation_f1_reward` is the mean of `reward/citation_f1`.
    part = figure.metric.removeprefix("objective/")
    column = figure.metric if part == figure.metric else f"reward/{part.removesuffix('_reward')}"
    column = "reward" if figure.metric == "scores" else column
    if not rows or column not in rows[0]:
        column = "reward"
        found.notes.append(f"{figure.metric} is no mean over rollouts; they are shown by reward.")
    elif counted := [v for row in rows if (v := _value(row, column)).value is not None]:
        total, n = sum(v.value or 0.0 for v in counted), len({v.sample_id for v in counted})
        mean = total / len(counted)
        found.recomputed = Estimate(mean, None, None, n, total, len(counted), "none")
        found.agrees = abs(mean - figure.value) < 1e-9
    _add_samples(found, rows, column, prompts_of(workspace, paths[0], TRAINED_ON), wanted)


def _value(row: Row, column: str) -> SampleValue:
    value = row.get(column)
    number = float(value) if isinstance(value, int | float) else None
    return SampleValue(str(row["sample_id"]), int(row["sample_index"]), number)


def _add_samples(
    found: Explanation,
    rows: Sequence[Row],
    column: str,
    prompts: tuple[str, Path | None],
    wanted: str | None,
) -> None:
    """All samples, and one in full: that which was asked for, else that of the median."""
    found.values = tuple(
        sorted(
            (_value(row, column) for row in rows),
            key=lambda v: (v.value is None, v.value or 0.0, v[:2]),
        )
    )
    counted = found.counted or list(found.values)
    if not counted:
        return
    hits = counted[len(counted) // 2 :]
    if wanted is not None:
        hits = [v for v in found.values if wanted in (v.name, v.sample_id)]
    if not hits:
        raise ConfigurationError(
            f"No sample {wanted!r} is behind this number.",
            expected=f"one of {len(rows)}, such as {', '.join(v.name for v in counted[:_FEW])}",
            fix="name one of these with --sample",
        )
    which = hits[0]
    row = next(r for r in rows if (r["sample_id"], r["sample_index"]) == which[:2])
    data, path = prompts
    asked = None
    if path is None:
        gone = f"The prompts ({data or 'of the data stage'}) are not there any more."
        found.notes.append(gone)
    else:
        asked = next((p for p in load_prompts(path) if p.sample_id == which.sample_id), None)
        found.files["prompts"] = str(path)
    found.sample = {
        "which": which,
        "question": "" if asked is None else asked.question,
        "prompt": "" if asked is None else asked.prompt_text,
        "answer": str(row["response_text"]),
        **{name: str(row[name]) for name in ("status", "finish_reason")},
        "scores": _scores(row),
        "judgements": json.loads(row["judgements"]),
    }


def _scores(row: Row) -> dict[str, float | None]:
    """Every metric of a sample, or every part of a rollout's reward, by name."""
    if any(key.startswith("reward/") for key in row):
        parts = {k.removeprefix("reward/"): v for k, v in row.items() if k.startswith("reward/")}
        return {"reward": row.get("reward"), "advantage": row.get("advantage"), **parts}
    found = {k: v for k, v in row.items() if v is None or isinstance(v, float)}
    if "episode" not in row:
        return found
    # Of a task's numbers each attempt has but its own part, and that of its domain.
    return {k: v for k, v in found.items() if v is not None and "/" not in k}


# ---------------------------------------------------------------- for a terminal


#: Version of the JSON that `why --json` prints.
OUTPUT_VERSION = 1
WIDTH = 100
#: Candidates that are listed before the rest is counted.
_LISTED = 30
_CONTENT_LINES = 24


def one_line(figure: Figure) -> str:
    """A number with what it is: ``0.512 [0.480, 0.543]  citation_f1 of grpo, greedy, n = 64``."""
    if figure.kind == "fact":
        return f"{figure.value:.12g}  {figure.metric}, as it was recorded"
    said = f"{measured(figure.entry)}  {figure.metric} of {figure.model}"
    if figure.kind == "training":
        return f"{said} at step {figure.step}, in training"
    how = f"{figure.decoding}, {figure.under}" if figure.under else figure.decoding
    return f"{said}, {how}, n = {figure.entry.get('n')}"


def candidate_lines(figures: Sequence[Figure], asked: str) -> Iterator[str]:
    """Several numbers that may be meant, and how to say which."""
    yield f"{asked} is {len(figures)} recorded numbers:"
    yield ""
    apart = words_apart(figures)
    for figure, words in zip(figures[:_LISTED], apart, strict=False):
        where = f"  {figure.stage_id}" if words[-1] == figure.stage_id else ""
        part = "" if figure.matched == "value" else f"  (the {figure.matched} end of its interval)"
        yield f"  {one_line(figure)}{part}{where}"
    if len(figures) > _LISTED:
        yield f"  … and {len(figures) - _LISTED} more"


def explanation_lines(found: Explanation) -> Iterator[str]:
    """Everything behind one number."""
    figure, entry = found.figure, found.figure.entry
    yield one_line(figure)
    if figure.matched != "value":
        yield f"({figure.matched} is the end of its interval that you asked for)"
    yield ""
    if figure.kind == "evaluation":
        yield f"protocol  {entry.get('protocol_name') or entry['protocol']}"
        for name, value in figure.protocol.items():
            if name not in ("version", "decoding") and value not in (None, {}):
                yield from _wrapped(f"  {name:<20}", _in_words(value))
        if entry.get("numerator") is not None:
            agent = bool(figure.protocol.get("environment"))
            each = "tasks" if of_tasks(figure.metric) else "attempts" if agent else "samples"
            yield (
                f"value     {entry['numerator']:.6g} / {entry.get('denominator')} {each} = "
                f"{figure.value:.6g}, over n = {entry['n']} {'tasks' if agent else 'prompts'}"
            )
        yield f"interval  of 95 %: {entry.get('interval')}"
    again = found.recomputed
    if found.agrees:
        yield "computed  again from the samples: the same"
    elif found.agrees is not None:
        said = "nothing" if again is None else measured(again._asdict())
        yield f"computed  again from the samples: {said}, which is NOT what is recorded"
    if found.values:
        yield from _sample_lines(found)
    yield "files"
    for name, path in found.files.items():
        yield f"  {name:<9} {path}"
    if figure.record:
        yield f"  in record {figure.record.partition('#')[2] or 'all of it'}"
    for note in found.notes:
        yield from _wrapped("  note      ", note)


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_in_words(v)}" for k, v in value.items() if v is not None)
    text = str(value)
    digest = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    return f"{text[:12]}… (SHA-256)" if digest else text


def _sample_lines(found: Explanation) -> Iterator[str]:
    """How many samples there are, a few of the lowest, most typical and highest, one in full."""
    counted = found.counted
    left = 0 if of_tasks(found.figure.metric) else len(found.values) - len(counted)
    more = f" ({left} do not count: nothing was measured)" if left else ""
    yield f"samples   {len(counted)}{more}"
    middle = max(0, len(counted) - _FEW) // 2
    for label, start in (("lowest", 0), ("typical", middle), ("highest", -_FEW)):
        shown = counted[start:][:_FEW]
        said = ", ".join(f"{v.name} ({short(v.value)})" for v in shown) or "none"
        yield from _wrapped(f"  {label:<8}", said)
    if (sample := found.sample) is None:
        return
    yield f"sample    {sample['which'].name}, {found.figure.metric} {short(sample['which'].value)}"
    if sample["question"]:
        yield from _wrapped("  question  ", sample["question"])
    reason = sample["finish_reason"]
    ending = "" if reason == "stop" else f" (ended by {reason})"
    yield f"  answer    {sample['status']}{ending}"
    lines = [
        line
        for paragraph in sample["answer"].splitlines() or [""]
        for line in textwrap.wrap(paragraph, WIDTH - 6) or [""]
    ]
    if (left := len(lines) - _CONTENT_LINES) > 0:
        lines[_CONTENT_LINES:] = [f"… {left} more lines"]
    yield from (f"    | {line}" for line in lines)
    scores = ", ".join(f"{name} {short(value)}" for name, value in sample["scores"].items())
    yield from _wrapped("  scores    ", scores)
    yield "  judge" if sample["judgements"] else "  judge     was not asked"
    for judgement in sample["judgements"]:
        yield from _judgement_lines(judgement)


def _judgement_lines(judgement: Mapping[str, Any]) -> Iterator[str]:
    score, kind = judgement.get("score"), str(judgement.get("kind"))
    shown = "failed" if score is None else f"{score:.2f}"
    if kind == "check":
        text, shown = str(judgement.get("title")), "passed" if score else "missing"
    elif kind == "rubric":
        sign = "against" if judgement.get("polarity") == "negative" else "for"
        weight = f"{sign}, weight {judgement.get('weight', 1):g}, {judgement.get('source')}"
        text = f"{judgement.get('title')} ({weight}): {judgement.get('criterion')}"
    else:
        ids = ", ".join(judgement.get("ids") or ()) or "no source"
        text = f"{kind.replace('_', ' ')} [{ids}]: {judgement.get('claim')}"
    yield from _wrapped(f"    {shown:<7} ", text)
    if judgement.get("detail"):
        yield from _wrapped("            ", f"said: {judgement['detail']}")


def _wrapped(head: str, text: str) -> list[str]:
    rest = " " * len(head)
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=rest, break_long_words=False
    )
    return lines or [head.rstrip()]


# ---------------------------------------------------------------- JSON


def explanation_json(found: Explanation) -> dict[str, Any]:
    """Everything behind one number, for scripts."""
    sample = found.sample
    return {
        **asdict(found.figure),
        "recomputed": found.recomputed and found.recomputed._asdict(),
        "agrees": found.agrees,
        "samples": [v._asdict() for v in found.values],
        "sample": sample and {**sample, "which": sample["which"]._asdict()},
        "files": found.files,
        "notes": found.notes,
    }
