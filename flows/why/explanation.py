"""Explanation of a number: samples, one answer in full, judgements, files.

In: a :class:`~flows.why.figures.Figure` and the workspace that it was recorded in. Out: one
document, as ``refiner why --json`` has it, and its text for a terminal of 100 columns
(``explanation.txt.jinja``). The number is computed again from its samples; what has been deleted
since is said, not left out.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from refiner_core.report.pages import template_of
from refiner_core.report.printing import measured

_FEW = 3

Row = Mapping[str, Any]


def explain_number(
    figure: Figure, workspace: str | Path = RecipeConfig.workspace, *, sample: str | None = None
) -> dict[str, Any]:
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
    dict
        What the figure has, and ``recomputed`` (the number from its samples; None where they are
        not there or it is no mean of samples), ``agrees`` (whether that is what is recorded,
        interval included), ``samples`` (all of them, lowest first; those that do not count last),
        ``sample`` (one in full), ``files`` (in words -> path), ``notes`` (what could not be shown).

    Raises
    ------
    ConfigurationError
        There is no such sample.
    DataError
        The samples are damaged.
    """
    room = Workspace.read_only(workspace)
    found = {**asdict(figure), "recomputed": None, "agrees": None, "samples": [], "sample": None}
    found |= {"files": {}, "notes": []}
    record = room.read_record(figure.stage_id) if figure.stage_id and room.stage_ids() else None
    if record is None:
        found["notes"].append(
            f"It was recorded in {figure.record or 'a place that nobody has named'}, which "
            f"{room.root} does not have: name the run's own with workspace=DIR to see the samples "
            "behind it."
        )
        return found
    found["files"]["record"] = str(room.root / figure.record.partition("#")[0])
    if figure.kind == "evaluation":
        _explain_evaluation(found, figure, room, sample)
    elif figure.kind == "training":
        _explain_training(found, figure, room, sample)
    return found


def _explain_evaluation(
    found: dict[str, Any], figure: Figure, workspace: Workspace, wanted: str | None
) -> None:
    result = workspace.read_result(figure.stage_id)
    assert result is not None, "an evaluation's numbers are in its result"
    folder = workspace.layout.stage(figure.stage_id).data / result.output_dir
    paths = workspace.layout.attempt(figure.stage_id, result.attempt)
    # The evidence of a card does not have the file's name.
    which = figure.model if figure.model in FLOORS else figure.decoding
    samples = folder / str(figure.entry.get("samples_file") or f"samples-{which}.parquet")
    found["files"] |= {"results": str(folder / RESULTS_FILE), "samples": str(samples)}
    try:
        rows = load_samples(samples)
    except DataError as error:
        found["notes"].append(str(error))
        return
    again = recompute(rows, figure.metric, from_json(RecipeConfig, workspace.part(paths, "config")))
    found["recomputed"] = again and again._asdict()
    found["agrees"] = again is not None and all(
        _near(value, figure.entry.get(name)) for name, value in again._asdict().items()
    )
    _add_samples(found, rows, figure.metric, prompts_of(workspace, paths, HELD_OUT), wanted)


def _near(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return abs(one - other) <= 1e-12 * max(1.0, abs(one))
    return bool(one == other)


def _explain_training(
    found: dict[str, Any], figure: Figure, workspace: Workspace, wanted: str | None
) -> None:
    assert figure.step is not None, "a point of a curve has a step"
    paths = list(attempts_of(workspace, figure.stage_id).values())
    name = f"{step_name(figure.step)}.parquet"
    for what, files in (
        ("metrics", (p.metrics for p in paths)),
        ("rollouts", (p.rollouts / name for p in paths)),
    ):
        for path in [p for p in files if p.exists()][:1]:
            found["files"][what] = str(path)
    if "rollouts" not in found["files"]:
        found["notes"].append(f"Step {figure.step} has no rollouts that are kept.")
        return
    rows = read_rollouts(Path(found["files"]["rollouts"]))
    # `objective/citation_f1_reward` is the mean of `reward/citation_f1`.
    part = figure.metric.removeprefix("objective/")
    column = figure.metric if part == figure.metric else f"reward/{part.removesuffix('_reward')}"
    column = "reward" if figure.metric == "scores" else column
    if not rows or column not in rows[0]:
        column = "reward"
        note = f"{figure.metric} is no mean over rollouts; they are shown by reward."
        found["notes"].append(note)
    elif counted := [row for row in rows if isinstance(row.get(column), int | float)]:
        total = sum(float(row[column]) for row in counted)
        n = len({row["sample_id"] for row in counted})
        again = Estimate(total / len(counted), None, None, n, total, len(counted), "none")
        found["recomputed"] = again._asdict()
        found["agrees"] = abs(again.value - figure.value) < 1e-9
    _add_samples(found, rows, column, prompts_of(workspace, paths[0], TRAINED_ON), wanted)


def counted_samples(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The samples that count, lowest first."""
    return [one for one in found["samples"] if one["value"] is not None]


def sample_name(sample: Mapping[str, Any]) -> str:
    """By which ``--sample`` knows it."""
    return f"{sample['sample_id']}#{sample['number']}"


def _add_samples(
    found: dict[str, Any],
    rows: Sequence[Row],
    column: str,
    prompts: tuple[str, Path | None],
    wanted: str | None,
) -> None:
    """All samples, and one in full: that which was asked for, else that of the median."""
    every = []
    for row in rows:
        value = float(row[column]) if isinstance(row.get(column), int | float) else None
        which = {"sample_id": str(row["sample_id"]), "number": int(row["sample_index"])}
        every.append(({**which, "value": value}, row))
    every.sort(key=lambda one: (one[0]["value"] is None, one[0]["value"] or 0.0, *one[0].values()))
    found["samples"] = [one for one, _ in every]
    counted = counted_samples(found) or found["samples"]
    if not counted:
        return
    hits = counted[len(counted) // 2 :]
    if wanted is not None:
        hits = [v for v in found["samples"] if wanted in (sample_name(v), v["sample_id"])]
    if not hits:
        raise ConfigurationError(
            f"No sample {wanted!r} is behind this number.",
            expected=f"one of {len(rows)}, such as {', '.join(map(sample_name, counted[:_FEW]))}",
            fix="name one of these with --sample",
        )
    row = next(row for one, row in every if one is hits[0])
    data, path = prompts
    asked = None
    if path is None:
        gone = f"The prompts ({data or 'of the data stage'}) are not there any more."
        found["notes"].append(gone)
    else:
        asked = next((p for p in load_prompts(path) if p.sample_id == hits[0]["sample_id"]), None)
        found["files"]["prompts"] = str(path)
    found["sample"] = {
        "which": hits[0],
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


def explanation_lines(figure: Figure, found: Mapping[str, Any]) -> Iterator[str]:
    """Everything behind one number."""
    counted = counted_samples(found)
    middle = max(0, len(counted) - _FEW) // 2
    starts = {"lowest": 0, "typical": middle, "highest": -_FEW}
    text = template_of(__package__, "explanation.txt.jinja").render(
        f=found,
        one_line=one_line(figure),
        agent=bool(figure.protocol.get("environment")),
        tasks=of_tasks(figure.metric),
        counted=counted,
        shown={label: counted[start:][:_FEW] for label, start in starts.items()},
        sample_name=sample_name,
        answer=_answer_lines(found["sample"]["answer"]) if found["sample"] else (),
        in_words=_in_words,
        wrapped=_wrapped,
    )
    yield from text.splitlines()


def _answer_lines(answer: str) -> list[str]:
    lines = [
        line
        for paragraph in answer.splitlines() or [""]
        for line in textwrap.wrap(paragraph, WIDTH - 6) or [""]
    ]
    if (left := len(lines) - _CONTENT_LINES) > 0:
        lines[_CONTENT_LINES:] = [f"… {left} more lines"]
    return lines


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_in_words(v)}" for k, v in value.items() if v is not None)
    text = str(value)
    digest = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    return f"{text[:12]}… (SHA-256)" if digest else text


def _wrapped(head: str, text: str) -> str:
    rest = " " * len(head)
    lines = textwrap.fill(
        text, WIDTH, initial_indent=head, subsequent_indent=rest, break_long_words=False
    )
    return lines or head.rstrip()
