"""Page of all samples of a run: ``samples.html``, and the folder ``samples`` beside it.

In: a :class:`~flows.reporting.run.stages.RunReading`. Out: every rollout, attempt of rejection
sampling and evaluated answer. A page opened as a file cannot fetch, so it loads scripts:
``index.js`` has the small columns of all samples, ``KEY-N.js`` a part of :data:`PART` complete
samples or prompts, loaded when they are shown or searched. Scripts contain only names and base64 of
compressed JSON, so that no text of a policy is code.

Each file of samples is read once, batch by batch: its parts are named by its content and kept.
Those of rollouts that were deleted since stay on the page. Memory: one batch and the index.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flows.reporting.run.results import (
    MOST_OF_PROMPT,
    ModelEvaluation,
    clip,
    text_in_evaluation,
    text_in_training,
)
from flows.reporting.run.stages import UNREADABLE, RunReading
from flows.reporting.samples import credit_of
from flows.stored import (
    HELD_OUT,
    SAMPLES_PAGE,
    SCRIPT_CALL,
    TRAINED_ON,
    newest_rollouts,
    part_of_file,
    prompts_of,
)
from infra.store import atomic
from infra.store.traces import rollout_batches
from infra.store.workspace import now_text
from refiner_core.contract.config import RewardConfig
from refiner_core.contract.errors import DataError
from refiner_core.report.printing import finite
from refiner_core.report.run.run_report import Row
from refiner_core.report.transcripts import conversation, verdict_of

FOLDER, INDEX = "samples", "index.js"
#: Samples of a part, and prompts of one.
PART, _PROMPTS = 500, 100
#: Maximum number of samples; of a longer training every second, third … step is shown.
MOST_SAMPLES = 1_000_000
#: Maximum length of a question in a list, and number of judgements of a sample.
_MOST_OF_QUESTION, _MOST_JUDGEMENTS = 120, 200
#: Age at which a file of an earlier page is removed, seconds.
_OLD_S = 3600
_VERSION = 1
_BULK = ("logprobs", "own", "turn_advantages")
_LENGTHS = ("response_ids", "token_ids", "length_tokens")
#: Outcome of a criterion, as in the page's script.
_MET, _NOT_MET, _UNUSABLE = range(3)
_FAILED = ("malformed", "unscored", "failed", "error")


@dataclass(frozen=True)
class _Source:
    """One file of samples. Sources of one ``family`` may have answers to the same prompts, earlier
    ones first; ``order`` is the place on the page."""

    stage: str
    label: str
    family: str
    order: tuple[int, int]
    path: Path
    reward: RewardConfig
    said: Callable[[dict[str, Any], RewardConfig], Row]
    prompts: str
    made_by: tuple[Any, ...]

    @property
    def name(self) -> str:
        return f"{self.stage}/{self.label}"

    @property
    def key(self) -> str:
        """Name of its parts, by its content: files of samples are never changed."""
        told = [_VERSION, *self.made_by, self.path.name, self.path.stat().st_size]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def write_samples_page(
    reading: RunReading,
    evaluations: Sequence[ModelEvaluation],
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Write the page; False for a run without samples. ``progress`` is called with the number of
    files read, and of all. Unreadable files become warnings."""
    from refiner_core.report.samples.rendering import page

    place = folder / FOLDER
    usual = reading.workspace.layout.reports / reading.run.run / FOLDER
    if not place.exists() and usual.exists():  # it may have samples of rollouts that were deleted
        shutil.copytree(usual, place)
    former = _former(place / INDEX)
    prompts: dict[str, Path] = {}
    sources = sorted(_sources(reading, evaluations, prompts), key=lambda s: s.order)
    shown = _thinned(reading, sources)
    there = {source.name for source in sources}
    found = {
        name: entry
        for name, entry in former["sources"].items()
        if name not in there and entry["stage"] in reading.run.stages and _whole(place, entry)
    }
    for number, source in enumerate(shown, start=1):
        what = f"The samples of {source.name}"
        if made := reading.tried(what, _entry, place, source, former["sources"]):
            found[source.name] = made
        if progress is not None:
            progress(number, len(shown))
    if not found:
        return False
    ordered = sorted(found.values(), key=lambda entry: entry["order"])
    wanted = {entry["prompts"] for entry in ordered}
    known = {k: e for k, e in former["prompts"].items() if k in wanted and _whole(place, e)}
    for key in sorted(wanted & prompts.keys() - known.keys()):
        made = reading.tried("The prompts of samples", _prompts, place, key, prompts[key])
        known |= {} if made is None else {key: made}
    index = {"version": _VERSION, "part": PART, "sources": ordered, "prompts": known}
    index["left_out"] = len(sources) - len(shown)
    atomic.write_text(place / INDEX, f"{SCRIPT_CALL}{json.dumps(index)})\n")
    total = sum(entry["n"] for entry in ordered)
    text = page(reading.run.run, reading.run.recipe, total, now_text())
    atomic.write_text(folder / SAMPLES_PAGE, text)
    _remove_others(place, index)
    return True


def _former(path: Path) -> dict[str, dict[str, Any]]:
    """Sources by name and prompts of the index that exists; none of a damaged one."""
    try:
        index = json.loads(path.read_text(encoding="utf-8")[len(SCRIPT_CALL) : -2])
        if index["version"] == _VERSION:
            sources = {entry["name"]: entry for entry in index["sources"]}
            for entry in (*index["sources"], *index["prompts"].values()):
                _files(entry)
            return {"sources": sources, "prompts": index["prompts"]}
    except UNREADABLE:
        pass
    return {"sources": {}, "prompts": {}}


def _files(entry: Mapping[str, Any]) -> list[str]:
    return [f"{entry['key']}-{number}.js" for number in range(entry["parts"])]


def _whole(place: Path, entry: Mapping[str, Any]) -> bool:
    return all((place / name).exists() for name in _files(entry))


def _remove_others(place: Path, index: Mapping[str, Any]) -> None:
    """Remove old files that are no part of the page; a new one may be of another writer."""
    entries = [*index["sources"], *index["prompts"].values()]
    kept = {INDEX, *(name for entry in entries for name in _files(entry))}
    for path in place.iterdir():
        if path.name not in kept and path.stat().st_mtime < time.time() - _OLD_S:
            path.unlink(missing_ok=True)


# ---------------------------------------------------------------- sources


def _sources(
    reading: RunReading, evaluations: Sequence[ModelEvaluation], prompts: dict[str, Path]
) -> Iterator[_Source]:
    """All files of samples; adds their files of prompts."""

    def source(name: str, attempt: int, file: str, **more: Any) -> _Source:
        stage_id = reading.run.stages[name]
        read = reading.workspace.layout.attempt(stage_id, attempt)
        data, path = prompts_of(reading.workspace, read, file)
        key = hashlib.sha256(f"{_VERSION} {data} {file}".encode()).hexdigest()[:16]
        if path is not None:
            prompts[key] = path
        reward = reading.config_of(name).reward
        made_by = (stage_id, attempt, file)
        return _Source(stage=name, reward=reward, prompts=key, made_by=made_by, **more)

    for place, (name, history) in enumerate(reading.histories.items()):
        kind, result = history.record.spec.kind, history.record.result
        if kind == "grpo":
            number, files = newest_rollouts(reading.workspace, history.stage_id)
            for step, path in files.items():
                where = {"label": str(step), "family": name, "order": (place, step), "path": path}
                yield source(name, number, TRAINED_ON, **where, said=text_in_training)
        elif kind == "sample" and result is not None:
            path = (reading.output(name) or Path()) / "attempts.parquet"
            where = {"label": "attempts", "family": name, "order": (place, 0), "path": path}
            if path.is_file():
                yield source(name, result.attempt, TRAINED_ON, **where, said=_text_of_attempt)
    for place, one in enumerate(evaluations, start=len(reading.names)):
        names = dict.fromkeys(str(entry["samples_file"]) for entry in one.report["evaluations"])
        for number, file in enumerate(names):
            label, path = part_of_file(file), one.folder / file
            family = ", ".join(filter(None, (label, one.under)))
            where = {"label": label, "family": family, "order": (place, number), "path": path}
            if path.is_file():
                yield source(one.name, one.attempt, HELD_OUT, **where, said=_text_of_evaluation)


def _text_of_evaluation(row: dict[str, Any], reward: RewardConfig) -> Row:
    return text_in_evaluation(row, "", reward)


def _text_of_attempt(row: dict[str, Any], reward: RewardConfig) -> Row:
    """One attempt of rejection sampling, as a rollout."""
    detail = json.loads(row["detail"])
    components = {f"reward/{k}": v for k, v in json.loads(row["components"]).items()}
    row |= {"sample_index": row["index"], "response_text": row["text"], "step": 0}
    row |= {"finish_reason": row["ended"], "judgements": detail, **components}
    if isinstance(detail, dict):
        row |= {"episode": json.dumps(detail), "judgements": []}
    said = text_in_training(row, reward)
    metrics = {**said["metrics"], "score": finite(row["score"])}
    kept = f"{'kept' if row['kept'] else 'not kept'}: {row['why']}"
    return {**said, "metrics": metrics, "status": kept}


def _thinned(reading: RunReading, sources: Sequence[_Source]) -> Sequence[_Source]:
    """Sources with at most :data:`MOST_SAMPLES` samples: of training every k-th step and the
    last."""
    found = [reading.tried(str(s.path), pq.read_metadata, s.path) for s in sources]
    sizes = [0 if one is None else one.num_rows for one in found]
    steps = [s for s in sources if s.said is text_in_training]
    of_steps = sum(n for s, n in zip(sources, sizes, strict=True) if s.said is text_in_training)
    left = max(1, MOST_SAMPLES - (sum(sizes) - of_steps))
    kept = {s.name for s in (*steps[:: math.ceil(of_steps / left) or 1], *steps[-1:])}
    return [s for s in sources if s.said is not text_in_training or s.name in kept]


# ---------------------------------------------------------------- files


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 5, mtime=0)).decode()


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _write_part(place: Path, name: str, lines: Sequence[str]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    packed = _packed("\n".join(lines))
    atomic.write_bytes(
        place / f"{name}.js", f'{SCRIPT_CALL}"{name}","{packed}")'.encode(), sync=False
    )


def _entry(place: Path, source: _Source, former: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Entry of a source in the index; its parts are written unless they are there."""
    key, known = source.key, former.get(source.name, {})
    if known.get("key") != key or not _whole(place, known):
        known = {**_parts(place, source, key), "key": key, "name": source.name}
    where = {name: getattr(source, name) for name in ("stage", "label", "family", "prompts")}
    return {**known, **where, "order": list(source.order)}


def _parts(place: Path, source: _Source, key: str) -> dict[str, Any]:
    index, number = _Index(), 0
    for rows in rollout_batches(source.path, PART, _BULK, _LENGTHS[:2]):
        lines = []
        for row in rows:
            said = source.said(row, source.reward)
            judgements = [*map(_judged, said["judgements"][:_MOST_JUDGEMENTS])]
            index.add(row, said, judgements)
            lines.append(_line({**_shown(said), "judgements": judgements}))
        _write_part(place, f"{key}-{number}", lines)
        number += 1
    return {"n": len(index.numbers), "parts": number, "index": _packed(_line(index.columns()))}


def _prompts(place: Path, key: str, path: Path) -> dict[str, Any]:
    ids: list[str] = []
    questions: list[str] = []
    number = count()
    try:
        with pq.ParquetFile(path) as file:
            names = ["sample_id", "question", "prompt_text"]
            for batch in file.iter_batches(_PROMPTS, columns=names):
                rows = batch.to_pylist()
                ids += [row["sample_id"] for row in rows]
                questions += [(row["question"] or "")[:_MOST_OF_QUESTION] for row in rows]
                shown = ((r["question"], clip(r["prompt_text"], MOST_OF_PROMPT)) for r in rows)
                _write_part(place, f"{key}-{next(number)}", [*map(_line, shown)])
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{path} has no prompts: {error}",
            expected="a Parquet file as the data stage writes it",
            fix="remove the data stage and run the recipe again",
        ) from error
    index = {"ids": ids, "questions": questions, "part": _PROMPTS}
    return {"key": key, "parts": next(number), "index": _packed(_line(index))}


# ---------------------------------------------------------------- rows


class _Index:
    """Small columns of one source: a number per sample, and tables of names."""

    def __init__(self) -> None:
        # A new name gets the next number.
        self.prompts, self.failures, self.criteria = (
            defaultdict[str, int](count().__next__) for _ in range(3)
        )
        self.numbers: list[tuple[Any, ...]] = []

    def add(self, row: Mapping[str, Any], said: Row, judgements: Sequence[Row]) -> None:
        """Add a sample."""
        score = said["reward"] if said["reward"] is not None else said["metrics"].get("success")
        length = next((row[n] for n in _LENGTHS if row.get(n) is not None), len(said["text"]))
        met = _outcomes(said, judgements)
        outcomes = [3 * self.criteria[name] + one for name, one in met.items()]
        self.numbers.append(
            (
                *(self.prompts[str(row["sample_id"])], int(row["sample_index"])),
                *(None if score is None else float(f"{score:.5g}"), int(length)),
                *(self.failures[_failure(row, said)], outcomes),
            )
        )

    def columns(self) -> dict[str, Any]:
        """The index as JSON."""
        tables = {n: list(getattr(self, n)) for n in ("prompts", "failures", "criteria")}
        names = ("prompt", "number", "score", "length", "failure", "outcomes")
        columns = zip(*self.numbers, strict=True) if self.numbers else [()] * len(names)
        return {**tables, **dict(zip(names, map(list, columns), strict=True))}


def _failure(row: Mapping[str, Any], said: Row) -> str:
    """Kind of a sample's failure; empty for none."""
    if (episode := said["episode"]) is not None:
        kind = {"error": "error_kind", "failed": "failure"}.get(verdict_of(episode)[0])
        return "" if kind is None else str(episode.get(kind) or "error")
    if row.get("status") in _FAILED:
        return str(row["status"])
    return "" if said["finish_reason"] in ("stop", "") else f"ended: {said['finish_reason']}"


def _outcomes(said: Row, judgements: Sequence[Row]) -> dict[str, int]:
    """Criterion -> worst outcome in the sample."""
    found: dict[str, int] = {}
    for one in judgements:
        if one["outcome"] is None:
            continue
        found[one["name"]] = max(found.get(one["name"], 0), one["outcome"])
    for check in (said["episode"] or {}).get("checks") or ():
        found[str(check.get("name"))] = _MET if check.get("passed") else _NOT_MET
    return found


def _judged(judgement: Mapping[str, Any]) -> dict[str, Any]:
    """A judgement for display; its ``name`` is the criterion to filter by."""
    kind, score = str(judgement.get("kind") or ""), finite(judgement.get("score"))
    rubric = kind in ("rubric", "")
    name = judgement.get("title") or judgement.get("criterion") if rubric else kind
    credit = math.nan if score is None else credit_of(judgement)
    outcome: int | None = _UNUSABLE if math.isnan(credit) else _MET if credit >= 0.5 else _NOT_MET
    if kind == "citation_needed" and score is not None:
        outcome = None  # neither answer is better
    about = judgement.get("criterion") if rubric else judgement.get("claim")
    words = [str(judgement[n]) for n in ("detail", "reason") if judgement.get(n)]
    return {
        **{"name": str(name or kind or "judgement"), "about": str(about or ""), "score": score},
        **{"outcome": outcome, "words": words, "weight": finite(judgement.get("weight"))},
        "negative": judgement.get("polarity") == "negative",
    }


def _shown(said: Row) -> dict[str, Any]:
    talk = None if said["episode"] is None else conversation(said["episode"])
    parts = [[p["name"], p["value"], p["weight"], p["share"]] for p in said["parts"]]
    names = ("text", "status", "finish_reason", "failed", "metrics")
    return {**{n: said[n] for n in names}, "parts": parts, "talk": talk}
