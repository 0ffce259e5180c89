"""Results of a rescoring: one JSON document, and its sections for a terminal.

In: policies, settings, comparisons, a matrix, bills as plain values, as in ``rescore.json``: every
share has its numerator and denominator, every number its interval. Out: sections with words and
tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from refiner_core.report.printing import MISSING, Section, measured

#: Version of ``rescore.json``. Raised when an older reader would misread it.
DOCUMENT_VERSION = 1
_COMPARISON = (
    *("setting", "kendall's tau", "best changes", "sign changes", "no signal", "mean total"),
    "unscored",
)
_AGREEMENT = ("question", "pairs", "same score", "kappa", "quadratic kappa", "milder by")
_COUNTED = ("questions", "reused", "stored", "asked", "failed")


def sections(document: Mapping[str, Any]) -> Iterator[Section]:
    """All displayed sections, in order."""
    fidelity = document["fidelity"].items()
    yield Section("Stored rewards", tuple(fidelity_line(*each) for each in fidelity))
    for policy in (p["name"] for p in document["policies"]):
        entries = [c for c in document["comparisons"] if c["policy"] == policy]
        if entries:
            yield Section(
                f"{policy}, compared with {entries[0]['baseline']}",
                (
                    "(best changes: groups that share no best sample with the baseline; no signal: "
                    "groups without spread; in brackets 95 % over prompts)",
                ),
                _COMPARISON,
                tuple(map(_comparison_row, entries)),
            )
    for entry in document["comparisons"]:
        if entry["agreement"]:
            title = f"Agreement of the judges: {entry['policy']}, {entry['setting']}"
            yield Section(title, (), _AGREEMENT, tuple(map(_agreement_row, entry["agreement"])))
    if (matrix := document["matrix"]) is not None:
        title = f"Policies under each setting (mean {matrix['metric']})"
        header = ("policy", *matrix["ranks"])
        yield Section(title, (), header, tuple(_matrix_rows(matrix)))
    if document["judging"]:
        header = ("judge", *_COUNTED, "tokens")
        rows = tuple(map(_judging_row, document["judging"]))
        yield Section("Judging", (judged_line(document),), header, rows)


def _comparison_row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """A row with arrows from baseline to setting."""
    return (
        entry["setting"],
        measured(entry["kendall"] or {}, MISSING),
        share(entry["best_changed"]),
        share(entry["sign_changed"]),
        _moved(entry["no_signal"], "{:.0%}"),
        _moved(entry["means"]["total"], "{:.3f}"),
        f"{entry['unscored']['baseline']} → {entry['unscored']['setting']}",
    )


def _agreement_row(found: Mapping[str, Any]) -> tuple[str, ...]:
    """One kind of question."""
    return (
        found["kind"],
        str(found["pairs"]),
        share(found["raw"]),
        measured(found["kappa"], MISSING),
        measured(found["quadratic"], MISSING),
        _number(found["mean_difference"], "{:+.3f}"),
    )


def _judging_row(bill: Mapping[str, Any]) -> tuple[str, ...]:
    tokens = f"{bill['prompt_tokens']} + {bill['completion_tokens']}" if bill["calls"] else MISSING
    counts = (str(bill[name]) for name in _COUNTED)
    return (bill["judge"], *counts, tokens)


def _matrix_rows(matrix: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for policy, cells in matrix["cells"].items():
        ranks = {s: f"  #{r[policy]}" if policy in r else "" for s, r in matrix["ranks"].items()}
        yield (policy, *(measured(cells[s] or {}, MISSING) + rank for s, rank in ranks.items()))


def fidelity_line(name: str, found: Mapping[str, Any]) -> str:
    """Sentence on how well a policy's own settings reproduce the stored values."""
    if not found["exact"]:
        return f"warning: {name}: {found['warning']}"
    advantages = "" if found["advantages"] is None else " and advantages"
    return (
        f"{name}: the run's own settings give back all {found['rollouts']} stored totals"
        f"{advantages}, to the bit."
    )


def judged_line(document: Mapping[str, Any]) -> str:
    """Sentence on the calls to servers, if any."""
    bills = document["judging"]
    asked = sum(bill["asked"] for bill in bills if bill["calls"])
    if not asked:
        return "No server was asked: all judgements were known or not needed."
    calls = sum(bill["calls"] for bill in bills)
    failed = sum(bill["failed"] for bill in bills)
    lost = f"; {failed} failed, and their rollouts are unscored" if failed else ""
    return f"{asked} questions were asked in {calls} calls{lost}."


# ---------------------------------------------------------------- numbers


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else form.format(value)


def share(found: Mapping[str, Any] | None) -> str:
    """``12/40 = 30 % [18, 45]``."""
    if found is None:
        return MISSING
    text = f"{found['numerator']:.0f}/{found['denominator']} = {100 * found['value']:.0f} %"
    if found["low"] is None:
        return text
    return f"{text} [{100 * found['low']:.0f}, {100 * found['high']:.0f}]"


def _moved(pair: Mapping[str, Any], form: str) -> str:
    values = [None if e is None else e["value"] for e in (pair["baseline"], pair["setting"])]
    return " → ".join(_number(value, form) for value in values)
