"""Explanation of a number: find the recorded value, and everything behind it.

In: words of a user, and a workspace. Out: :class:`RecordedNumber` values (metrics of evaluations
and of training steps), and for one of them a document (``refiner why --json``) and its text for a
terminal. A number matches a value that is printed in the same way: ``0.512`` matches 0.51234, not
0.5131. The value is recomputed from its samples; deleted files are reported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flows.running.status import find_run
from flows.stored import (
    HELD_OUT,
    TRAINED_ON,
    attempts_of,
    newest_metrics,
    part_of_file,
    prompts_of,
    sample_address,
)
from infra.store.checkpoints import step_name
from infra.store.traces import read_rollouts
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.kinds import BASELINES, TRAINED, model_order
from refiner_core.contract.records import from_json
from refiner_core.data.prepared import load_prompts
from refiner_core.evaluation.metrics import load_samples
from refiner_core.evaluation.results import recompute
from refiner_core.report.pages import template_of
from refiner_core.report.printing import measured

_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?\s*%?", re.IGNORECASE)
_INTERVAL = re.compile(r"\[[^\]]*\]")
#: Default metric of training: the mean reward of a step.
_REWARD = "scores"


class _Query(NamedTuple):
    """_Query for a number: its printed form, and names of it."""

    number: str = ""
    names: tuple[str, ...] = ()

    def means(self, value: float) -> bool:
        """True for a value that is printed as the number."""
        text = self.number.rstrip("% ").lower()
        if not text:
            return True
        form = f".{len(text.partition('e')[0].partition('.')[2])}{'e' if 'e' in text else 'f'}"
        printed = f"{value * (100.0 if '%' in self.number else 1.0):{form}}"
        return printed == f"{float(text):{form}}" or float(text) == 0.0 == float(printed)


@dataclass(frozen=True)
class RecordedNumber:
    """One recorded number.

    Attributes
    ----------
    kind
        ``evaluation`` or ``training`` (a metric of a step).
    model, metric, decoding, step
        Its names; the decoding is for evaluations, the step for training.
    entry, protocol
        Its complete record, and the content of its protocol's fingerprint.
    record, stage_id
        Its place: a path in the workspace with the position in that file, and the stage.
    """

    kind: str
    model: str
    metric: str
    value: float
    decoding: str = ""
    step: int | None = None
    entry: Mapping[str, Any] = field(default_factory=dict)
    protocol: Mapping[str, Any] = field(default_factory=dict)
    record: str = ""
    stage_id: str = ""

    @property
    def words(self) -> list[str]:
        """Words that match only this value."""
        step = "" if self.step is None else f"step{self.step}"
        under = str(self.entry.get("under") or "")
        words = (self.metric, self.model, self.decoding, under, step, self.stage_id)
        return [word for word in words if word]


def parse_query(words: Sequence[str]) -> _Query:
    """Query from words; an interval copied with its number is ignored.

    Raises
    ------
    ConfigurationError
        There are no words, or two numbers.
    """
    text = _INTERVAL.sub("", "\n".join(words)).split("\n")
    numbers = [word.strip() for word in text if _NUMBER.fullmatch(word.strip())]
    names = tuple(n for word in text if (n := word.strip()) and n not in numbers)
    if len(numbers) > 1 or not (numbers or names):
        raise ConfigurationError(
            f"`refiner why` was given {' '.join(words) or 'nothing'}.",
            expected="one number as it is printed, or names of one: `0.512`, `citation_f1 grpo "
            "greedy`, `scores step5`",
            fix="ask for one number at a time",
        )
    return _Query("".join(numbers), names)


def figures_of_stages(
    query: _Query, workspace: Workspace, stage_ids: Iterable[str]
) -> list[RecordedNumber]:
    """Matching values of some stages, each once; unless a protocol file is named, the recipe's own
    protocol comes first."""
    found: dict[tuple[Any, ...], RecordedNumber] = {}
    for stage_id in stage_ids:
        for figure in _figures(workspace, stage_id, query.names):
            if query.means(figure.value) and set(query.names) <= set(figure.words):
                # All evaluations repeat the baselines.
                words = figure.words[: -1 if figure.model in BASELINES else None]
                found.setdefault((*words, figure.entry.get("protocol"), figure.value), figure)
    hits = sorted(found.values(), key=lambda f: (model_order(f.model), f.words))
    own = [figure for figure in hits if not figure.entry.get("under")]
    named = any(figure.entry.get("under") in query.names for figure in hits)
    return hits if query.number or named else own or hits


def _figures(workspace: Workspace, stage_id: str, names: Sequence[str]) -> Iterator[RecordedNumber]:
    record = workspace.read_record(stage_id)
    if record is None:
        return
    report = record.result.report if record.result else {}
    for part in ("evaluations", "reference") if "evaluations" in report else ():
        for position, entry in enumerate(report[part]):
            yield RecordedNumber(
                "evaluation",
                **{name: entry[name] for name in ("metric", "value", "decoding")},
                model=str(entry["stage"]),
                entry=entry,
                protocol=report["protocols"].get(entry["protocol"], {}),
                record=f"stages/{stage_id}/result.json#report.{part}.{position}",
                stage_id=stage_id,
            )
    for line in newest_metrics(workspace, stage_id) if record.spec.kind in TRAINED else ():
        for name in {*names, _REWARD} & line.metrics.keys():
            if (value := line.metrics[name]) is not None:
                more: dict[str, Any] = {
                    "step": line.step,
                    "entry": {"value": value},
                    "stage_id": stage_id,
                }
                yield RecordedNumber("training", record.spec.name, name, value, **more)


def find_numbers(
    words: Sequence[str], workspace: str | Path = RecipeConfig.workspace
) -> list[RecordedNumber]:
    """Recorded values that match words.

    Parameters
    ----------
    words
        A number as it was printed (``["0.512"]``), or names (``["citation_f1", "grpo", "greedy"]``)
        and perhaps a run.
    workspace
        The folder to search.

    Returns
    -------
    list of Figure
        At least one.

    Raises
    ------
    ConfigurationError
        No value matches; the message lists the known names.
    """
    ws = Workspace.read_only(workspace)
    known = ws.run_ids()
    is_run = {w for w in words if any(r == w or r.endswith(f"-{w}") for r in known if len(w) > 3)}
    run = find_run(ws, next(iter(is_run), None))
    query = parse_query([word for word in words if word not in is_run])
    newest = list(run.stages.values()) if run else []
    stage_ids = newest if is_run else ws.stage_ids()
    for ids in (newest, stage_ids):
        if found := figures_of_stages(query, ws, ids):
            return found
    others = figures_of_stages(_Query(), ws, stage_ids)
    there = list(dict.fromkeys(word for figure in others for word in figure.words[:3]))
    unknown = next((name for name in query.names if name not in there), "")
    expected = f"a number as it is printed, or names of one: {', '.join(there[:12]) or 'none here'}"
    if query.number and others and not unknown:
        wanted = float(query.number.rstrip("% "))
        near = sorted(others, key=lambda figure: abs(figure.value - wanted))[:3]
        expected = "one that is recorded; the nearest are "
        expected += "; ".join(f"{f.value:.6g} ({' '.join(f.words[:3])})" for f in near)
    raise ConfigurationError(
        f"{run.run if run and is_run else ws.root} has no number that is {' '.join(words)!r}."
        f"{suggest(unknown, there) if unknown else ''}",
        expected=expected,
        fix="name one of these, another run or workspace=DIR (`refiner runs` lists runs)",
    )


def explain_number(
    figure: RecordedNumber,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    sample: str | None = None,
) -> dict[str, Any]:
    """Origin of a number: its protocol, samples, answers and judgements.

    Parameters
    ----------
    figure
        From :func:`flows.api.find_numbers`.
    workspace
        The folder that has its records.
    sample
        The sample to show in full (default: a typical one).

    Returns
    -------
    dict
        The fields of the figure, and ``recomputed`` (the value from its samples; None if they are
        gone or it is no mean of samples), ``agrees`` (True if that equals the record, including the
        interval), ``samples`` (all of them, lowest first; those that do not count last), ``sample``
        (one in full), ``files`` (description -> path), ``notes`` (missing parts).

    Raises
    ------
    ConfigurationError
        There is no such sample.
    DataError
        The samples are damaged.
    """
    ws, evaluated = Workspace.read_only(workspace), figure.kind == "evaluation"
    found: dict[str, Any] = {**asdict(figure), "recomputed": None, "agrees": None}
    found |= {"samples": [], "sample": None}
    column: str = figure.metric
    attempts = list(attempts_of(ws, figure.stage_id).values())
    if evaluated:
        folder = ws.output_dir(figure.stage_id)
        path = None if folder is None else folder / str(figure.entry["samples_file"])
    else:
        name = f"{step_name(figure.step or 0)}.parquet"
        path = next((p for a in attempts if (p := a.rollouts / name).exists()), None)
        column = "reward" if column == _REWARD else column
    found |= {"files": {"samples": str(path)}, "notes": []}
    if path is None or not path.exists():
        return found | {"notes": ["The samples behind it are not kept."]}
    rows = load_samples(path) if evaluated else read_rollouts(path)
    if evaluated:
        config = from_json(RecipeConfig, ws.part(attempts[0], "config"))
        again = recompute(rows, column, config)
        found["recomputed"] = again and again._asdict()
        found["agrees"] = again is not None and all(
            math.isclose(getattr(again, n) or 0.0, figure.entry[n] or 0.0, rel_tol=1e-12)
            for n in ("value", "low", "high")
        )
    elif column not in rows[0]:
        found["notes"] = [f"{column} is no mean over rollouts; they are shown by reward."]
        column = "reward"
    _add_samples(found, rows, column, sample)
    part = part_of_file(figure.entry["samples_file"]) if evaluated else figure.step or 0
    if figure.model not in BASELINES:
        which = found["sample"]["which"]
        shown = {"sample_id": which["sample_id"], "sample_index": which["number"]}
        found["sample"]["page"] = sample_address(ws, figure.stage_id, part, shown)
    data, prompts = prompts_of(ws, attempts[0], HELD_OUT if evaluated else TRAINED_ON)
    asked = {prompt.sample_id: prompt for prompt in (load_prompts(prompts) if prompts else ())}
    if prompt := asked.get(found["sample"]["which"]["sample_id"]):
        found["sample"] |= {"question": prompt.question, "prompt": prompt.prompt_text}
    else:
        found["notes"].append(f"Its prompt ({data or 'of the data stage'}) is not there any more.")
    return found


def _add_samples(
    found: dict[str, Any], rows: Sequence[Mapping[str, Any]], column: str, wanted: str | None
) -> None:
    """All samples, and one in full: the requested one, else the median."""
    by_name: dict[str, Any] = {f"{row['sample_id']}#{row['sample_index']}": row for row in rows}
    samples: list[dict[str, Any]] = [
        {"name": name, "sample_id": str(row["sample_id"]), "number": int(row["sample_index"])}
        | {"value": float(row[column]) if isinstance(row.get(column), int | float) else None}
        for name, row in by_name.items()
    ]
    samples.sort(key=lambda s: (s["value"] is None, s["value"] or 0.0, s["name"]))
    found["samples"] = samples
    counted = [s for s in samples if s["value"] is not None] or samples
    which = counted[len(counted) // 2]
    if wanted is not None:
        which = next((s for s in samples if wanted in (s["name"], s["sample_id"])), {})
    if not which:
        raise ConfigurationError(
            f"No sample {wanted!r} is behind this number.",
            expected=f"one of {len(rows)}, such as {', '.join(s['name'] for s in counted[:3])}",
            fix="name one of these with --sample",
        )
    row = by_name[which["name"]]
    found["sample"] = {
        **{
            "which": which,
            "page": "",
            "question": "",
            "prompt": "",
            "answer": str(row["response_text"]),
        },
        **{name: str(row[name]) for name in ("status", "finish_reason")},
        "scores": {k: v for k, v in row.items() if isinstance(v, float)},
        "judgements": json.loads(row["judgements"]),
    }


#: Version of the JSON that `why --json` prints.
OUTPUT_VERSION = 1


def one_line(figure: RecordedNumber) -> str:
    """A value with its names: ``0.512 [0.480, 0.543]  citation_f1 of grpo, greedy, n = 64``."""
    said = f"{measured(figure.entry)}  {figure.metric} of {figure.model}"
    if figure.step is not None:
        return f"{said} at step {figure.step}, in training"
    words = (figure.decoding, figure.entry.get("under"), f"n = {figure.entry.get('n')}")
    return ", ".join([said, *filter(None, words)])


def candidate_lines(figures: Sequence[RecordedNumber], asked: str) -> list[str]:
    """Several matching values, with the stages that distinguish them."""
    lines = (f"  {one_line(figure)}  {figure.stage_id}" for figure in figures)
    return [f"{asked} is {len(figures)} recorded numbers:", "", *lines]


def explanation_lines(figure: RecordedNumber, found: Mapping[str, Any]) -> list[str]:
    """Everything behind one number."""
    template = template_of(__package__, "explanation.txt.jinja")
    return template.render(f=found, one_line=one_line(figure)).splitlines()
