"""A number's explanation: recorded numbers, which of them is meant, and all that lies behind it.

In: words of a person, and the workspace that numbers are recorded in. Out: :class:`Figure` values
(numbers of evaluations, points of training curves, and, of a card, every other number that it
shows), and of one of them a document, as ``refiner why --json`` has it, and its text for a terminal
of 100 columns (``explanation.txt.jinja``). A number is meant if it is printed as the person has it:
``0.512`` means 0.51234 and not 0.5131. It is computed again from its samples; what has been deleted
since is said, not left out.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flows.running.status import find_run
from flows.stored import HELD_OUT, TRAINED_ON, attempts_of, prompts_of
from infra.store.checkpoints import step_name
from infra.store.stage_records import EVIDENCE
from infra.store.traces import read_metrics, read_rollouts
from infra.store.workspace import Workspace
from refiner_core.cards.build import card_numbers
from refiner_core.cards.evidence import Evidence, load_evidence
from refiner_core.cards.facts import finite, record_of
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.fields import suggest
from refiner_core.contract.kinds import FLOORS, TRAINED, model_order
from refiner_core.contract.records import RunRecord, StageRecord, from_json
from refiner_core.data.prepared import load_prompts
from refiner_core.evaluation.metrics import METRICS, load_samples, of_tasks
from refiner_core.evaluation.results import RESULTS_FILE, recompute
from refiner_core.evaluation.statistics import Estimate
from refiner_core.report.pages import template_of
from refiner_core.report.printing import folded, measured

_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?\s*%?", re.IGNORECASE)
_STEP = re.compile(r"(?:@|step-?)(\d+)", re.IGNORECASE)
_INTERVAL = re.compile(r"\[[^\]]*\]")
_DECODINGS = ("greedy", "sampled")

Kind = Literal["evaluation", "training", "fact"]


class _Query(NamedTuple):
    """Question for a number: a number as it was printed, names, a training step."""

    number: str = ""
    names: tuple[str, ...] = ()
    step: int | None = None

    @property
    def decimals(self) -> int:
        """Digits after the point of the number."""
        return len(self.number.rstrip("% ").lower().partition("e")[0].partition(".")[2])

    def means(self, value: float) -> bool:
        """Yes for a value that is printed as the number."""
        if not self.number:
            return True
        asked = float(self.number.rstrip("% "))
        if self.number.endswith("%"):
            value *= 100.0
        form = f".{self.decimals}{'e' if 'e' in self.number.lower() else 'f'}"
        said = f"{value:{form}}"
        return said == f"{asked:{form}}" or (asked == 0.0 == float(said))


@dataclass(frozen=True)
class Figure:
    """One recorded number.

    Attributes
    ----------
    kind
        ``evaluation``, ``training`` (a point of a curve), or ``fact`` (any other on a card).
    model, metric, decoding, step
        What it is; decoding of evaluations, step of training.
    matched
        Which part of it is the number that was asked for: ``value``, ``low`` or ``high``.
    entry
        All that is recorded of it.
    protocol
        What its protocol's fingerprint stands for.
    record
        Where it stands: a path in the workspace, and what in that file.
    stage_id
        The stage of that record; empty where there is none.
    """

    kind: Kind
    model: str
    metric: str
    value: float
    decoding: str = ""
    step: int | None = None
    matched: str = "value"
    entry: Mapping[str, Any] = field(default_factory=dict)
    protocol: Mapping[str, Any] = field(default_factory=dict)
    record: str = ""
    stage_id: str = ""

    @property
    def under(self) -> str:
        """The protocol file that it was measured under; empty for the recipe's own protocol."""
        return str(self.entry.get("under") or "")

    @property
    def names(self) -> tuple[str, ...]:
        """The words that it can be asked for by."""
        found = (self.metric, self.model, self.decoding, self.under, self.stage_id)
        return tuple(n for n in found if n)

    @property
    def words(self) -> list[str]:
        """The words that mean it, and no other of its run."""
        step = [f"step{self.step}"] if self.step is not None else []
        return [n for n in (self.metric, self.model, self.decoding, self.under) if n] + step


def parse_query(words: Sequence[str]) -> _Query:
    """Question in the words; an interval that was copied along with its number is passed over.

    Raises
    ------
    ConfigurationError
        There are none, or two numbers.
    """
    given, text = words, _INTERVAL.sub("", "\n".join(words))
    words = [w.strip() for w in text.split("\n") if w.strip()]
    numbers = [w for w in words if _NUMBER.fullmatch(w)]
    steps = [m.group(1) for w in words if (m := _STEP.fullmatch(w))]
    names = tuple(w for w in words if not _NUMBER.fullmatch(w) and not _STEP.fullmatch(w))
    if len(numbers) > 1 or len(steps) > 1 or not words:
        raise ConfigurationError(
            f"`refiner why` was given {' '.join(given) or 'nothing'}.",
            expected="one number as it is printed, or names of one: `0.512`, `citation_f1 grpo "
            "greedy`, `scores step5`",
            fix="ask for one number at a time",
        )
    return _Query("".join(numbers), names, int(steps[0]) if steps else None)


def figures_of_stages(
    query: _Query, workspace: Workspace, stage_ids: Iterable[str]
) -> list[Figure]:
    """The numbers of some stages that are meant."""
    found: list[Figure] = []
    nights: dict[str, str] | None = None
    for stage_id in stage_ids:
        record = workspace.read_record(stage_id)
        if record is None:
            continue
        report = record.result.report if record.result is not None else {}
        if record.spec.kind == "evaluate" and report:
            own = list(_of_evaluation(stage_id, report))
            if record.spec.model == "base":
                nights = _night_checkpoints(workspace) if nights is None else nights
                if night := nights.get(stage_id):  # its checkpoint goes by its own name
                    own = [replace(f, model=night) if f.model == "base" else f for f in own]
            found += own
        elif record.spec.kind in TRAINED:
            points = list(_points(report))
            if query.step is not None or query.names:
                points += _logged(workspace, stage_id, record, query)
            found += (_point(record.spec.name, *point, stage_id) for point in points)
    return _asked_for(found, query)


def _night_checkpoints(workspace: Workspace) -> dict[str, str]:
    """Evaluations that nights alone have asked for: the names of the checkpoints that they are of.
    To its recipe, what a night measures is the base that it starts from."""
    found: dict[str, str] = {}
    others: set[str] = set()
    for run in map(workspace.read_run, workspace.run_ids()):
        night = run.provenance.get("nightly")
        found |= dict.fromkeys(run.stages.values(), str(night["checkpoint"])) if night else {}
        others.update(() if night else run.stages.values())
    return {stage_id: name for stage_id, name in found.items() if stage_id not in others}


def _of_evaluation(stage_id: str, report: Mapping[str, Any]) -> Iterator[Figure]:
    for part in ("evaluations", "reference"):
        for position, entry in enumerate(report[part]):
            record = f"stages/{stage_id}/result.json#report.{part}.{position}"
            yield _evaluated(entry, report["protocols"], record)


def _evaluated(entry: Mapping[str, Any], protocols: Mapping[str, Any], record: str) -> Figure:
    return Figure(
        kind="evaluation",
        model=str(entry["stage"]),
        metric=str(entry["metric"]),
        decoding=str(entry["decoding"]),
        value=entry["value"],
        entry=entry,
        protocol=protocols.get(str(entry["protocol"]), {}),
        record=record,
        stage_id=_stage_of(record),
    )


def _points(report: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """Name, step and value of the points of all curves of a report."""
    curves = list((report.get("curves") or {}).items())
    for name, value in report.items():
        if isinstance(value, Mapping) and value.get("curve"):
            curves.append((name, value["curve"]))
    for name, points in curves:
        yield from ((name, int(step), value) for step, value in points)


def _logged(
    workspace: Workspace, stage_id: str, record: StageRecord, query: _Query
) -> Iterator[tuple[str, int, Any]]:
    """Every logged step of the metrics that are asked for by name, and of the reward."""
    for attempt in record.attempts:
        for line in read_metrics(workspace.layout.attempt(stage_id, attempt.number).metrics):
            for name in {*query.names, "scores"} & line.metrics.keys():
                yield name, line.step, line.metrics[name]


def _point(model: str, name: str, step: int, value: Any, stage_id: str) -> Figure:
    entry, record = {"value": value, "step": step}, f"stages/{stage_id}/result.json#report"
    return Figure("training", model, name, value, "", step, "value", entry, {}, record, stage_id)


def figures_of_card(query: _Query, evidence: Evidence) -> list[Figure]:
    """The numbers of a card that are meant, by the evidence that lies beside it."""
    facts = evidence.facts
    found = [
        _evaluated(entry, facts.protocols, record_of(facts, f"evaluations.{position}") or "")
        for position, entry in enumerate(facts.evaluations)
    ]
    for name, report in facts.reports.items():
        stage_id = _stage_of(record_of(facts, f"reports.{name}") or "")
        found += (_point(name, *point, stage_id) for point in _points(report))
    if query.number:
        for shown in card_numbers(facts):
            path, where = shown.fact, shown.record or ""
            if not path.startswith("evaluations.") and "curve" not in path:
                value = facts.fact(path)
                found.append(
                    Figure("fact", "", path, value, record=where, stage_id=_stage_of(where))
                )
    return _asked_for(found, query)


def _stage_of(record: str) -> str:
    parts = record.partition("#")[0].split("/")
    return parts[1] if len(parts) > 1 and parts[0] == "stages" else ""


def _part_meant(figure: Figure, query: _Query) -> str | None:
    """What of a number is meant (``value``, or an end of its interval); None for nothing."""
    if query.step is not None and query.step != figure.step:
        return None
    parts = {"value": figure.value} | {k: figure.entry.get(k) for k in ("low", "high")}
    known = ((k, finite(value)) for k, value in parts.items())
    return next((k for k, value in known if value is not None and query.means(value)), None)


def _asked_for(figures: Iterable[Figure], query: _Query) -> list[Figure]:
    """Those that are meant, each once: values before ends of intervals, and where names alone are
    given that no protocol file has, the recipe's own protocol."""
    found: dict[tuple[Any, ...], Figure] = {}
    for figure in figures:
        part = _part_meant(figure, query)
        if part is not None and all(name in figure.names for name in query.names):
            # All evaluations repeat the floor; attempts at a training repeat steps.
            value = None if figure.kind == "training" else figure.value
            stage = "" if figure.model in FLOORS else figure.stage_id
            key = (*figure.words, figure.entry.get("protocol"), value, stage)
            found.setdefault(key, replace(figure, matched=part))
    hits = sorted(
        found.values(),
        key=lambda f: (model_order(f.model), f.metric, f.decoding, f.under, f.step or 0),
    )
    if not query.number and not any(f.under in query.names for f in hits if f.under):
        hits = [f for f in hits if not f.under] or hits
    return [f for f in hits if f.matched == "value"] or hits


def words_apart(figures: Sequence[Figure]) -> list[list[str]]:
    """For each number the words that mean it and none of the others: its stage's id with them,
    where two runs have one of the same names."""
    said = [figure.words for figure in figures]
    return [
        [*words, figure.stage_id] if said.count(words) > 1 and figure.stage_id else words
        for figure, words in zip(figures, said, strict=True)
    ]


def _nothing_found(query: _Query, others: Sequence[Figure], where: str) -> ConfigurationError:
    """Error where no number is meant; ``others`` are those that there are."""
    known = {*METRICS, *_DECODINGS, *(n for f in others for n in f.names)}
    unknown = next((n for n in query.names if n not in known), "")
    words = ", ".join(sorted({n for f in others for n in f.words[:3]})[:12] or METRICS)
    expected = f"a number as it is printed, or a metric, a model, a decoding: {words}"
    fix = "name one of these, another run or workspace=DIR (`refiner status --all` lists runs)"
    if query.number and others and not unknown:
        wanted = float(query.number.rstrip("% "))
        near = sorted(others, key=lambda f: abs(f.value - wanted))[:3]
        digits = max(3, query.decimals)
        said = "; ".join(f"{f.value:.{digits}f} ({' '.join(f.words)})" for f in near)
        expected = f"one that is recorded; the nearest are {said}"
        fix = "give it with the digits that you see, or by its names: "
        fix += f"`refiner why {' '.join(near[0].words)}`"
    step = "" if query.step is None else f"step{query.step}"
    asked = " ".join(filter(None, (query.number, *query.names, step)))
    hint = suggest(unknown, known) if unknown else ""
    return ConfigurationError(
        f"{where} has no number that is {asked!r}.{hint}", expected=expected, fix=fix
    )


def find_numbers(
    words: Sequence[str],
    workspace: str | Path = RecipeConfig.workspace,
    *,
    card: str | Path | None = None,
) -> list[Figure]:
    """The recorded numbers that words mean.

    Parameters
    ----------
    words
        A number as it was printed (``["0.512"]``), or names (``["citation_f1", "grpo", "greedy"]``)
        and perhaps a run.
    workspace
        The folder that is looked through.
    card
        A card with its evidence beside it; then its numbers are looked at.

    Returns
    -------
    list of Figure
        At least one.

    Raises
    ------
    ConfigurationError
        None fits; says what there is.
    """
    room = Workspace.read_only(workspace)
    look: Callable[[_Query], list[Figure]]
    if card is not None:
        evidence, where = _evidence(Path(card)), f"the evidence of {card}"
        query, look = parse_query(words), partial(figures_of_card, evidence=evidence)
    else:
        run, names = _run_of(room, words)
        query, newest = parse_query(names), list(run.stages.values()) if run else []
        if found := figures_of_stages(query, room, newest):
            return found
        named = run is not None and len(names) < len(words)
        where = f"run {run.run}" if run is not None and named else str(room.root)
        ids = newest if named else room.stage_ids()
        look = partial(figures_of_stages, workspace=room, stage_ids=ids)
    if found := look(query):
        return found
    raise _nothing_found(query, look(_Query(names=query.names)) or look(_Query()), where)


def _run_of(workspace: Workspace, words: Sequence[str]) -> tuple[RunRecord | None, list[str]]:
    """The run that a word names, else the newest; and the other words."""
    known = workspace.run_ids()
    for word in words:
        if any(word == run or (len(word) >= 4 and run.endswith(f"-{word}")) for run in known):
            return find_run(workspace, word), [w for w in words if w != word]
    return find_run(workspace), list(words)


def _evidence(path: Path) -> Evidence:
    """Evidence that a card was made from.

    Raises
    ------
    ConfigurationError
        There is no evidence beside it.
    """
    file = (path if path.is_dir() else path.parent) / EVIDENCE
    try:
        path.stat()
        return load_evidence(file.read_text(encoding="utf-8"))
    except OSError as error:
        unread = f"{file} cannot be read ({error.strerror})."
        raise ConfigurationError(
            unread if path.exists() else f"There is no {path}.",
            expected=f"a card that refiner has published, with its {EVIDENCE} beside it",
            fix="name its folder, or README.md in it; or leave --card out and name the run's "
            "workspace=DIR",
        ) from error


# ---------------------------------------------------------------- what is behind it

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
        wrapped=lambda head, text: folded(text, head),
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
