"""Results of a rescoring as one JSON document, and that document as tables and as a figure.

In: policies, settings, comparisons, a matrix, bills. Out: plain values for ``rescore.json``, in
which every share has its numerator and denominator and every number its interval; Markdown; one SVG
file that needs nothing else: advantages under the baseline against those under each setting, the
share of groups whose best sample changes, and the judge x policy matrix. Every mark has its number
beside it, so that nothing is told by colour alone (colours: Okabe and Ito's, "Color Universal
Design", 2008).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from refiner_core.judge_report.measures import plain
from refiner_core.report.pages import template_of
from refiner_core.report.printing import MISSING, measured, piped, table
from refiner_core.rescoring.compare import (
    Comparison,
    CriterionAgreement,
    Matrix,
    sign_changes,
)

#: Version of ``rescore.json``. Raised when an older reader would misread it.
DOCUMENT_VERSION = 1


def comparison_json(
    policy: str,
    setting: str,
    baseline: str,
    comparison: Comparison,
    agreements: Sequence[CriterionAgreement],
) -> dict[str, Any]:
    """One setting against its baseline, on one policy."""
    return {
        "policy": policy,
        "setting": setting,
        "baseline": baseline,
        **plain(comparison),
        "no_signal": _beside(comparison.no_signal),
        "means": {name: _beside(pair) for name, pair in comparison.means.items()},
        "unscored": {"baseline": comparison.unscored[0], "setting": comparison.unscored[1]},
        "agreement": [_agreement(found) for found in agreements],
    }


def _beside(pair: Any) -> dict[str, Any]:
    return {"baseline": plain(pair.first), "setting": plain(pair.second)}


def _agreement(found: CriterionAgreement) -> dict[str, Any]:
    named = {"kind": found.kind, "title": found.title, "criterion": found.criterion}
    return {**named, **plain(found.agreement)}


def matrix_json(matrix: Matrix) -> dict[str, Any]:
    """The matrix with its reversals."""
    reversals = [{**plain(reversal), "clear": reversal.clear} for reversal in matrix.reversals]
    return {**plain(matrix), "reversals": reversals}


COMPARISON_HEADER = (
    "setting",
    "rank correlation",
    "best changes",
    "sign changes",
    "no signal",
    "mean total",
    "unscored",
)
#: So many changes of order that may be chance are told; the rest are counted.
_BY_CHANCE = 3
JUDGING_HEADER = ("judge", "questions", "reused", "stored", "asked", "failed", "tokens", "cost")


def comparison_rows(document: Mapping[str, Any], policy: str) -> list[list[str]]:
    """One row per setting: of numbers with an arrow, baseline to setting."""
    rows = []
    for entry in document["comparisons"]:
        if entry["policy"] != policy:
            continue
        rows.append(
            [
                entry["setting"],
                with_interval(entry["spearman"]),
                share(entry["best_changed"]),
                share(entry["sign_changed"]),
                _moved(entry["no_signal"], "{:.0%}"),
                _moved(entry["means"]["total"], "{:.3f}"),
                f"{entry['unscored']['baseline']} → {entry['unscored']['setting']}",
            ]
        )
    return rows


def judging_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """One row per judge."""
    rows = []
    for bill in document["judging"]:
        tokens = f"{bill['prompt_tokens']} + {bill['completion_tokens']}"
        rows.append(
            [
                bill["judge"],
                *(str(bill[name]) for name in ("questions", "reused", "stored", "asked", "failed")),
                tokens if bill["calls"] else MISSING,
                MISSING if bill["cost"] is None else f"{bill['cost']:.2f}",
            ]
        )
    return rows


def agreement_rows(entry: Mapping[str, Any]) -> list[list[str]]:
    """One row per kind of question and rubric."""
    return [
        [
            found["title"] or (found["criterion"][:60] if found["criterion"] else found["kind"]),
            str(found["pairs"]),
            share(found["raw"]),
            with_interval(found["kappa"]),
            with_interval(found["quadratic"]),
            number(found["mean_difference"], "{:+.3f}"),
        ]
        for found in entry["agreement"]
    ]


AGREEMENT_HEADER = ("question", "pairs", "same score", "kappa", "quadratic kappa", "milder by")


def matrix_rows(document: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the judge x policy matrix."""
    matrix = document["matrix"]
    settings = list(matrix["ranks"])
    rows = []
    for policy, cells in matrix["cells"].items():
        row = [policy]
        for setting in settings:
            found = cells[setting]
            rank = matrix["ranks"][setting].get(policy)
            row.append(with_interval(found) + ("" if rank is None else f"  #{rank}"))
        rows.append(row)
    return ["policy", *settings], rows


def reversal_lines(document: Mapping[str, Any]) -> list[str]:
    """True if the settings agree on the order of the policies, in sentences: what is clear first;
    of what may be chance, the first few."""
    matrix = document["matrix"]
    if not matrix["reversals"]:
        return ["All settings put the policies in the same order."]
    lines = []
    clear = [found for found in matrix["reversals"] if found["clear"]]
    chance = [found for found in matrix["reversals"] if not found["clear"]]
    for found in (*clear, *chance[:_BY_CHANCE]):
        first, second = found["policies"]
        than, under = found["difference_than"]["value"], found["difference_under"]["value"]
        luck = "both differences are clear" if found["clear"] else "not beyond chance"
        lines.append(
            f"{first} is ahead of {second} under {found['than']} ({than:+.3f}), behind under "
            f"{found['under']} ({under:+.3f}): {luck}."
        )
    if (more := len(chance) - _BY_CHANCE) > 0:
        lines.append(f"Changes that are not beyond chance: {more} more (rescore.json).")
    return lines


def markdown(document: Mapping[str, Any]) -> str:
    """``table.md``."""
    policies = [
        f"- **{p['name']}**: run `{p['run']}`, stage `{p['stage']}`"
        + (f", steps {p['steps'][0]} to {p['steps'][-1]}" if p["steps"] else "")
        + f"; {p['rollouts']} rollouts in {p['groups']} groups on {p['prompts']} prompts"
        for p in document["policies"]
    ]
    parts = ["# Rescored rollouts", "\n".join(policies)]
    for name, found in document["fidelity"].items():
        line = fidelity_line(name, found)
        parts.append(line if found["exact"] else f"**{line}**")
    for policy in (p["name"] for p in document["policies"]):
        if rows := comparison_rows(document, policy):
            baseline = next(c["baseline"] for c in document["comparisons"] if c["policy"] == policy)
            parts.append(f"## {policy}, compared with {baseline}")
            parts.append(table(COMPARISON_HEADER, rows, piped))
    for entry in document["comparisons"]:
        if entry["agreement"]:
            parts.append(f"## Agreement of the judges: {entry['policy']}, {entry['setting']}")
            parts.append(table(AGREEMENT_HEADER, agreement_rows(entry), piped))
    if document["matrix"] is not None:
        parts.append(f"## Policies under each setting (mean {document['matrix']['metric']})")
        parts.append(table(*matrix_rows(document), piped))
        parts.append("\n".join(f"- {line}" for line in reversal_lines(document)))
    if document["judging"]:
        parts.append("## Judging")
        parts.append(table(JUDGING_HEADER, judging_rows(document), piped))
    parts.append("Intervals are of 95 %, over prompts. Shares are numerator / denominator.")
    return "\n\n".join(parts) + "\n"


def fidelity_line(name: str, found: Mapping[str, Any]) -> str:
    """True if a policy's own settings give back what was stored."""
    if not found["exact"]:
        return f"{name}: {found['warning']}"
    advantages = "" if found["advantages"] is None else " and advantages"
    return (
        f"{name}: the run's own settings give back all {found['rollouts']} stored totals"
        f"{advantages}, to the bit."
    )


# ---------------------------------------------------------------- numbers


def number(value: float | None, form: str = "{:.3f}") -> str:
    """A number, or a dash."""
    return MISSING if value is None else form.format(value)


def with_interval(found: Mapping[str, Any] | None) -> str:
    """``0.812 [0.771, 0.846]``."""
    return measured(found or {}, MISSING)


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
    return " → ".join(number(value, form) for value in values)


WIDTH, _MARGIN = 960, 24
_PANEL, _GAP, _PER_ROW = 200, 28, 4
#: Panels and points that are drawn; the JSON and Parquet files have all.
MOST_PANELS = 12
MOST_POINTS = 1500
_CHARACTER = 6.2  # width at 11 px, about


class Cloud(NamedTuple):
    """Advantages of the same samples under the baseline and a setting."""

    policy: str
    setting: str
    pairs: Sequence[tuple[float, float]]


def draw(document: Mapping[str, Any], clouds: Sequence[Cloud]) -> str:
    """The whole figure."""
    shown = [cloud for cloud in clouds if cloud.pairs]
    bars = [c for c in document["comparisons"] if c["best_changed"] is not None]
    matrix = document.get("matrix") or {}
    heights = {
        "panels": 26 + math.ceil(min(len(shown), MOST_PANELS) / _PER_ROW) * (_PANEL + 52),
        "bars": 46 + 22 * len(bars),
        "matrix": 50 + 36 * len(matrix.get("cells", ())),
    }
    tops, y = {}, 30
    for name, there in (("panels", shown), ("bars", bars), ("matrix", matrix)):
        if there:
            tops[name] = y + 16
            y += heights[name] + 16
    runs = ", ".join(dict.fromkeys(p["run"] for p in document["policies"]))
    if len(runs) >= 90:
        runs = f"{len(document['policies'])} runs"
    several = len({c["policy"] for c in bars}) > 1
    return template_of(__package__, "figure.svg.jinja").render(
        title=f"Rescored: {runs}",
        height=y + _MARGIN,
        tops=tops,
        side=_PANEL,
        panels=[_panel(i, document, cloud) for i, cloud in enumerate(shown[:MOST_PANELS])],
        with_policy=len({cloud.policy for cloud in clouds}) > 1,
        more=len(shown[MOST_PANELS:]),
        bars=[
            (f"{c['policy']}: {c['setting']}" if several else c["setting"], c["best_changed"])
            for c in bars
        ],
        matrix=matrix,
        cell=min(150.0, (WIDTH - 250 - _MARGIN) / max(1, len(matrix.get("ranks", ())))),
        shares=_shares(matrix),
        shade=_shade,
        cut=_cut,
    )


def _panel(place: int, document: Mapping[str, Any], cloud: Cloud) -> dict[str, Any]:
    """Advantages of one setting; samples that lie at one place are one larger mark."""
    row, column = divmod(place, _PER_ROW)
    found = (
        entry["spearman"]["value"]
        for entry in document["comparisons"]
        if (entry["policy"], entry["setting"]) == (cloud.policy, cloud.setting)
    )
    value = next(found, None)
    said = "no rank correlation" if value is None else f"rank correlation {value:.3f}"
    limit = max(max(abs(a), abs(b)) for a, b in cloud.pairs) * 1.08 or 1.0
    half = _PANEL / 2
    spots = Counter(
        (round(half + a / limit * half, 1), round(half - b / limit * half, 1), sign_changes(a, b))
        for a, b in _some(cloud.pairs)
    )
    return {
        "x": _MARGIN + column * (_PANEL + _GAP),
        "y": 26 + row * (_PANEL + 52),
        "policy": cloud.policy,
        "setting": cloud.setting,
        "caption": f"{said}; ± {limit:.2g}",
        "spots": [
            (x, y, min(2.2 + 0.35 * (count - 1), 6.0), flipped)
            for (x, y, flipped), count in spots.items()
        ],
    }


def _some(pairs: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most so many of them, the same ones each time."""
    if len(pairs) <= MOST_POINTS:
        return pairs
    order = sorted(range(len(pairs)), key=lambda i: hashlib.sha256(str(i).encode()).digest())
    return [pairs[i] for i in order[:MOST_POINTS]]


def _shares(matrix: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Place of each mean in its column, from 0 to 1: a column is scaled by itself, as its numbers
    are."""
    shares = {}
    for setting in matrix.get("ranks", ()):
        column = {p: c[setting]["value"] for p, c in matrix["cells"].items() if c[setting]}
        low, high = min(column.values(), default=0.0), max(column.values(), default=0.0)
        for policy in matrix["cells"]:
            span = high - low if policy in column else 0.0
            shares[policy, setting] = (column[policy] - low) / span if span > 0 else 0.0
    return shares


def _shade(share: float) -> str:
    """From nearly white to dark blue."""
    pale, dark = (232, 241, 248), (0, 82, 130)
    return "#" + "".join(
        f"{round(p + (d - p) * share):02x}" for p, d in zip(pale, dark, strict=True)
    )


def _cut(text: str, width: float) -> str:
    """As much of the text as fits, by a guess at its width."""
    most = max(int(width / _CHARACTER), 4)
    return text if len(text) <= most else text[: most - 1] + "…"
