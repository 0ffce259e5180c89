"""An explanation for a terminal of 100 columns, and as JSON.

In: :class:`~flows.why.evidence.Explanation` values. Out: lines, or a mapping for scripts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flows.why.evidence import Explanation, Sample, SampleValue
from flows.why.figures import Figure, words_apart
from refiner_core.evaluation.metrics import of_tasks

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
    if found.agrees is not None:
        yield "computed  " + (
            "again from the samples: the same"
            if found.agrees
            else f"again from the samples: {_again(found)}, which is NOT what is recorded"
        )


def _again(found: Explanation) -> str:
    again = found.recomputed
    return "nothing" if again is None else f"{again.value:.6g} {_interval(again._asdict())}".strip()


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
        said = ", ".join(_part(v) for v in values) or "none"
        yield from _wrapped(f"  {label:<8}", said)


def _part(value: SampleValue) -> str:
    number = "-" if value.value is None else f"{value.value:.4g}"
    return f"{value.name} ({number})"


def _sample_lines(sample: Sample, metric: str) -> Iterator[str]:
    yield f"sample    {sample.which.name}, {metric} {_part(sample.which).rpartition('(')[2][:-1]}"
    if sample.question:
        yield from _wrapped("  question  ", sample.question)
    ending = "" if sample.finish_reason == "stop" else f" (ended by {sample.finish_reason})"
    yield f"  answer    {sample.status}{ending}"
    yield from _block(sample.answer)
    scores = ", ".join(
        f"{name} {'-' if value is None else format(value, '.4g')}"
        for name, value in sample.scores.items()
    )
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
    return {
        **figure_json(found.figure),
        "recomputed": None if found.recomputed is None else found.recomputed._asdict(),
        "agrees": found.agrees,
        "samples": [v._asdict() for v in found.values],
        "sample": None if found.sample is None else _sample_json(found.sample),
        "files": dict(found.files),
        "notes": list(found.notes),
    }


def figure_json(figure: Figure) -> dict[str, Any]:
    """One recorded number, for scripts."""
    return {
        **{k: v for k, v in asdict(figure).items() if k not in ("entry", "protocol")},
        "entry": dict(figure.entry),
        "protocol": dict(figure.protocol),
    }


def _sample_json(sample: Sample) -> dict[str, Any]:
    value = asdict(sample)
    return {**value, "which": sample.which._asdict()}
