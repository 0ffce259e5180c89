"""Evidence against itself: what can be recomputed in it without the samples.

In: a read ``refiner.json``. Out: findings. A value is its numerator over its denominator, an
interval holds it, Wilson intervals follow from counts, and what is said twice is said alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from refiner_core.cards.evidence import Evidence
from refiner_core.cards.facts import CardFacts, finite, record_of
from refiner_core.cards.lint.findings import Finding
from refiner_core.cards.resume import proof_problems
from refiner_core.contract.records import OutputFile

_CLOSE = 1e-9
_FIX = "evaluate and publish again; or take the evidence that was published"


def inconsistencies(evidence: Evidence) -> Iterator[Finding]:
    """What the evidence says that cannot be."""
    facts = evidence.facts
    pairs = {
        "step": (evidence.step, facts.step),
        "final": (evidence.final, facts.final),
        "fingerprint": (evidence.fingerprint, facts.fingerprint or evidence.fingerprint),
    }
    for name, (outside, inside) in pairs.items():
        if outside != inside:
            yield _finding(f"{name} is {outside!r}, and facts.{name} is {inside!r}")
    for problem in [*_of_rows(facts), *proof_problems(facts)]:
        yield _finding(problem)
    for place, entry in enumerate(facts.evaluations):
        for problem in [*_of_number(entry), *_of_protocol(facts, entry)]:
            yield _finding(f"{_name(facts, place, entry)}: {problem}")
        if _is_outside(entry):
            bootstrap = str(entry.get("interval", "")).startswith("bootstrap")
            value, low, high = entry["value"], entry["low"], entry["high"]
            message = f"{value!r} does not lie in its interval [{low!r}, {high!r}]"
            yield replace(
                _finding(f"{_name(facts, place, entry)}: {message}"),
                severity="warning" if bootstrap else "error",
            )


def file_findings(evidence: Evidence, present: Mapping[str, OutputFile | None]) -> list[Finding]:
    """Files of a publication that are not those that its evidence names.

    Parameters
    ----------
    present
        The files that lie beside the card and are named, with their sizes and hashes; None for one
        that is not there. Those that are left out were not looked at.
    """
    found = []
    for file in evidence.files:
        if file.path not in present:
            continue
        there = present[file.path]
        if there is None:
            found.append(f"{file.path} is missing")
        elif there.bytes != file.bytes:
            found.append(f"{file.path} has {there.bytes} bytes, its evidence says {file.bytes}")
        elif there.sha256 != file.sha256:
            found.append(
                f"{file.path} has SHA-256 {there.sha256[:12]}…, its evidence says "
                f"{file.sha256[:12]}…"
            )
    fix = "publish again; what is there already is not sent twice"
    return [Finding(1, "file-differs", message, fix) for message in found]


def _of_number(entry: Mapping[str, Any]) -> Iterator[str]:
    value, low, high = (finite(entry.get(key)) for key in ("value", "low", "high"))
    numerator, denominator = finite(entry.get("numerator")), finite(entry.get("denominator"))
    n = finite(entry.get("n"))
    if value is None:
        return
    quotient = numerator / denominator if numerator is not None and denominator else None
    if quotient is not None and not math.isclose(value, quotient, rel_tol=_CLOSE, abs_tol=_CLOSE):
        yield f"{value!r} is not {numerator:g} / {denominator:g} = {quotient!r}"
    if denominator is not None and n is not None and denominator < n:
        yield f"{n:g} prompts have {denominator:g} samples"
    if low is not None and high is not None:
        if low > high:
            yield f"its interval [{low!r}, {high!r}] ends before it begins"
        yield from _wilson(entry, value, low, high)


def _is_outside(entry: Mapping[str, Any]) -> bool:
    """Whether a value does not lie in its interval; few prompts and a skew can bring a bootstrap
    there, nothing brings a Wilson interval there."""
    value, low, high = (finite(entry.get(key)) for key in ("value", "low", "high"))
    if value is None or low is None or high is None or low > high:
        return False
    slack = _CLOSE * max(1.0, abs(value))
    return not low - slack <= value <= high + slack


def _of_protocol(facts: CardFacts, entry: Mapping[str, Any]) -> Iterator[str]:
    """No more prompts count than the protocol has."""
    prompts = finite((facts.protocols.get(entry["protocol"]) or {}).get("num_prompts"))
    n = finite(entry["n"])
    if prompts is not None and n is not None and n > prompts:
        yield f"n is {n:g}, and its protocol has {prompts:g} prompts"


def _of_rows(facts: CardFacts) -> Iterator[str]:
    """Rows that were read were kept or dropped."""
    for which, counts in (facts.reports.get("data") or {}).items():
        known = [finite(counts.get(key)) for key in ("read", "kept")] if counts else [None]
        if which in ("sft", "rl") and None not in known:
            read, kept = known
            dropped = sum((counts.get("dropped") or {}).values())
            if read != kept + dropped:
                yield (
                    f"facts.reports.data.{which}: {read:g} rows were read, and {kept:g} kept + "
                    f"{dropped:g} dropped"
                )


def _wilson(entry: Mapping[str, Any], value: float, low: float, high: float) -> Iterator[str]:
    """Wilson intervals follow from counts alone; others need the samples."""
    counts = {
        "wilson": (entry.get("numerator"), entry.get("denominator")),
        "wilson over prompts": (value * int(entry["n"]), entry["n"]),
    }.get(str(entry.get("interval")))
    numbers = [finite(count) for count in counts or (None, None)]
    successes, trials = numbers
    if successes is None or not trials or not 0 <= round(successes) <= round(trials):
        return
    from refiner_core.evaluation.statistics import wilson

    first, last = wilson(round(successes), round(trials))
    if not (math.isclose(first, low, abs_tol=1e-6) and math.isclose(last, high, abs_tol=1e-6)):
        yield (
            f"its interval is [{low:.6f}, {high:.6f}]; Wilson's of {round(successes)} of "
            f"{round(trials)} is [{first:.6f}, {last:.6f}]"
        )


def _name(facts: CardFacts, place: int, entry: Mapping[str, Any]) -> str:
    record = record_of(facts, f"evaluations.{place}")
    where = f", from {record}" if record else ""
    return (
        f"facts.evaluations.{place} ({entry['metric']} of {entry['stage']}, {entry['decoding']}"
        f"{where})"
    )


def _finding(message: str) -> Finding:
    return Finding(1, "evidence-inconsistent", message, _FIX)
