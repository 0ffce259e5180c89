"""Results of a rescoring as one JSON document, and that document as tables and as a figure.

In: policies, settings, comparisons, a matrix, bills. Out: plain values for ``rescore.json``, in
which every share has its numerator and denominator and every number its interval; Markdown; one SVG
file that needs nothing else: advantages under the baseline against those under each setting, the
share of groups whose best sample changes, and the judge x policy matrix. Every mark has its number
beside it, so that nothing is told by colour alone (colours: Okabe and Ito's, "Color Universal
Design", 2008).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from refiner_core.judge_report.measures import Agreement
from refiner_core.report.printing import table
from refiner_core.rescoring.compare import (
    Comparison,
    CriterionAgreement,
    Matrix,
    Reversal,
    sign_changes,
)

#: Version of ``rescore.json``. Raised when an older reader would misread it.
DOCUMENT_VERSION = 1


def plain(value: Any) -> Any:
    """Dataclasses, named tuples, mappings and sequences as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    return value


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
    numbers: Agreement = found.agreement
    return {
        "kind": found.kind,
        "title": found.title,
        "criterion": found.criterion,
        **plain(numbers),
    }


def matrix_json(matrix: Matrix) -> dict[str, Any]:
    """The matrix with its reversals."""
    return {**plain(matrix), "reversals": [_reversal(r) for r in matrix.reversals]}


def _reversal(reversal: Reversal) -> dict[str, Any]:
    return {**plain(reversal), "clear": reversal.clear}


MISSING = "—"
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
    """Whether the settings agree on the order of the policies, in sentences: what is clear first;
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
    return "\n".join(_markdown(document)) + "\n"


def _markdown(document: Mapping[str, Any]) -> Iterator[str]:
    yield "# Rescored rollouts"
    yield ""
    for policy in document["policies"]:
        steps = policy["steps"]
        where = f", steps {steps[0]} to {steps[-1]}" if steps else ""
        yield (
            f"- **{policy['name']}**: run `{policy['run']}`, stage `{policy['stage']}`{where}; "
            f"{policy['rollouts']} rollouts in {policy['groups']} groups on {policy['prompts']} "
            "prompts"
        )
    yield ""
    for name, found in document["fidelity"].items():
        yield from _fidelity(name, found)
    for policy in document["policies"]:
        if rows := comparison_rows(document, policy["name"]):
            yield f"## {policy['name']}, compared with {_baseline(document, policy['name'])}"
            yield ""
            yield table(COMPARISON_HEADER, rows, _cell)
            yield ""
    for entry in document["comparisons"]:
        if entry["agreement"]:
            yield f"## Agreement of the judges: {entry['policy']}, {entry['setting']}"
            yield ""
            yield table(AGREEMENT_HEADER, agreement_rows(entry), _cell)
            yield ""
    if document["matrix"] is not None:
        yield f"## Policies under each setting (mean {document['matrix']['metric']})"
        yield ""
        yield table(*matrix_rows(document), _cell)
        yield ""
        yield from (f"- {line}" for line in reversal_lines(document))
        yield ""
    if document["judging"]:
        yield "## Judging"
        yield ""
        yield table(JUDGING_HEADER, judging_rows(document), _cell)
        yield ""
    yield "Intervals are of 95 %, over prompts. Shares are numerator / denominator."


def _fidelity(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    if found["exact"]:
        yield fidelity_line(name, found)
    else:
        yield f"**{fidelity_line(name, found)}**"
    yield ""


def fidelity_line(name: str, found: Mapping[str, Any]) -> str:
    """Whether a policy's own settings give back what was stored."""
    if not found["exact"]:
        return f"{name}: {found['warning']}"
    advantages = "" if found["advantages"] is None else " and advantages"
    return (
        f"{name}: the run's own settings give back all {found['rollouts']} stored totals"
        f"{advantages}, to the bit."
    )


def _baseline(document: Mapping[str, Any], policy: str) -> str:
    return next(str(c["baseline"]) for c in document["comparisons"] if c["policy"] == policy)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


# ---------------------------------------------------------------- numbers


def number(value: float | None, form: str = "{:.3f}") -> str:
    """A number, or a dash."""
    return MISSING if value is None else form.format(value)


def with_interval(found: Mapping[str, Any] | None) -> str:
    """``0.812 [0.771, 0.846]``."""
    if found is None or found["value"] is None:
        return MISSING
    if found["low"] is None:
        return number(found["value"])
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


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


WIDTH = 960
_MARGIN = 24
_PANEL, _GAP = 200, 28
_PER_ROW = 4
#: Panels and points that are drawn; the JSON and Parquet files have all.
MOST_PANELS = 12
MOST_POINTS = 1500
_INK, _FAINT, _BLUE, _RED = "#222222", "#c8c8c8", "#0072B2", "#D55E00"
_BAR = "#56B4E9"
_NO_CORRELATION = "no rank correlation"  # one side is constant
_CHARACTER = 6.2  # width at 11 px, about


class _Style(NamedTuple):
    """How words look."""

    size: int = 11
    anchor: str = "start"
    fill: str = _INK
    weight: str = "normal"


_HEADING, _RIGHT, _MIDDLE = _Style(size=12), _Style(anchor="end"), _Style(anchor="middle")


class Cloud(NamedTuple):
    """Advantages of the same samples under the baseline and a setting."""

    policy: str
    setting: str
    pairs: Sequence[tuple[float, float]]


def draw(document: Mapping[str, Any], clouds: Sequence[Cloud]) -> str:
    """The whole figure."""
    parts: list[str] = []
    y = 30.0
    parts.append(_text(_MARGIN, y, _title(document), _Style(15, weight="bold")))
    for section in (_scatter(document, clouds), _bars(document), _heat(document)):
        lines, height = section
        if lines:
            parts.append(f'<g transform="translate(0 {y + 16:g})">')
            parts += lines
            parts.append("</g>")
            y += height + 16
    height = round(y + _MARGIN)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">'
    )
    title = f"<title>{escape(_title(document))}</title>"
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, title, ground, *parts, "</svg>", ""])


def _title(document: Mapping[str, Any]) -> str:
    runs = ", ".join(dict.fromkeys(p["run"] for p in document["policies"]))
    return f"Rescored: {runs}" if len(runs) < 90 else f"Rescored: {len(document['policies'])} runs"


# ---------------------------------------------------------------- advantages


def _scatter(document: Mapping[str, Any], clouds: Sequence[Cloud]) -> tuple[list[str], float]:
    shown = [cloud for cloud in clouds if cloud.pairs][:MOST_PANELS]
    if not shown:
        return [], 0
    more = len([c for c in clouds if c.pairs]) - len(shown)
    note = f" ({more} more in rewards.parquet)" if more else ""
    axes = "baseline (across) against setting (up), axes to the ± named"
    heading = f"Advantages: {axes}; ✕ where the sign changes{note}"
    lines = [_text(_MARGIN, 12, heading, _HEADING)]
    several = len({cloud.policy for cloud in clouds}) > 1
    for number, cloud in enumerate(shown):
        row, column = divmod(number, _PER_ROW)
        x, y = _MARGIN + column * (_PANEL + _GAP), 26 + row * (_PANEL + 52)
        lines.append(f'<g transform="translate({x} {y})">')
        lines += _panel(cloud, _correlation(document, cloud), several)
        lines.append("</g>")
    rows = (len(shown) + _PER_ROW - 1) // _PER_ROW
    return lines, 26 + rows * (_PANEL + 52)


def _correlation(document: Mapping[str, Any], cloud: Cloud) -> str:
    for entry in document["comparisons"]:
        if (entry["policy"], entry["setting"]) == (cloud.policy, cloud.setting):
            value = entry["spearman"]["value"]
            return _NO_CORRELATION if value is None else f"rank correlation {value:.3f}"
    return _NO_CORRELATION


def _panel(cloud: Cloud, correlation: str, with_policy: bool) -> Iterator[str]:
    limit = max((max(abs(a), abs(b)) for a, b in cloud.pairs), default=0.0) * 1.08 or 1.0
    half = _PANEL / 2
    yield f'<rect width="{_PANEL}" height="{_PANEL}" fill="none" stroke="{_FAINT}"/>'
    for x1, y1, x2, y2, dash in (
        (0, half, _PANEL, half, ""),
        (half, 0, half, _PANEL, ""),
        (0, _PANEL, _PANEL, 0, ' stroke-dasharray="3 3"'),
    ):
        yield f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{_FAINT}"{dash}/>'
    spots: dict[tuple[float, float, bool], int] = {}
    for a, b in _some(cloud.pairs):
        place = (
            round(half + a / limit * half, 1),
            round(half - b / limit * half, 1),
            sign_changes(a, b),
        )
        spots[place] = spots.get(place, 0) + 1
    for (x, y, flipped), count in spots.items():
        radius = min(2.2 + 0.35 * (count - 1), 6.0)
        if flipped:
            r = radius
            yield (
                f'<path d="M{x - r:g} {y - r:g}L{x + r:g} {y + r:g}M{x - r:g} {y + r:g}'
                f'L{x + r:g} {y - r:g}" stroke="{_RED}" stroke-width="1.2"/>'
            )
        else:
            yield f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{_BLUE}" opacity="0.45"/>'
    name = f"{cloud.policy}: {cloud.setting}" if with_policy else cloud.setting
    yield _text(0, _PANEL + 14, _cut(name, _PANEL + _GAP - 8), title=name)
    yield _text(0, _PANEL + 28, _cut(f"{correlation}; ± {limit:.2g}", _PANEL + _GAP - 8))


def _some(pairs: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most so many of them, the same ones each time."""
    if len(pairs) <= MOST_POINTS:
        return pairs
    order = sorted(range(len(pairs)), key=lambda i: hashlib.sha256(str(i).encode()).digest())
    return [pairs[i] for i in order[:MOST_POINTS]]


# ---------------------------------------------------------------- best samples


def _bars(document: Mapping[str, Any]) -> tuple[list[str], float]:
    shown = [c for c in document["comparisons"] if c["best_changed"] is not None]
    if not shown:
        return [], 0
    several = len({c["policy"] for c in shown}) > 1
    left, width = 330, WIDTH - 330 - 190
    lines = [
        _text(_MARGIN, 12, "Groups whose best sample changes (bar: share; line: 95 %)", _HEADING)
    ]
    for number, entry in enumerate(shown):
        y = 26 + 22 * number
        found = entry["best_changed"]
        name = f"{entry['policy']}: {entry['setting']}" if several else entry["setting"]
        lines.append(_text(left - 8, y + 12, _cut(name, left - 40), _RIGHT, name))
        lines.append(
            f'<rect x="{left}" y="{y + 2}" width="{max(found["value"] * width, 0.5):.1f}" '
            f'height="13" fill="{_BAR}"/>'
        )
        if found["low"] is not None:
            low, high = (left + found[end] * width for end in ("low", "high"))
            lines.append(
                f'<path d="M{low:.1f} {y + 8.5}L{high:.1f} {y + 8.5}M{low:.1f} {y + 5}v7'
                f'M{high:.1f} {y + 5}v7" stroke="{_INK}" stroke-width="1.2"/>'
            )
        counted = f"{found['numerator']:.0f} of {found['denominator']} ({found['value']:.0%})"
        lines.append(_text(left + width + 14, y + 12, counted))
    bottom = 26 + 22 * len(shown)
    for share in (0.0, 0.5, 1.0):
        x = left + share * width
        lines.append(f'<path d="M{x:g} 24V{bottom}" stroke="{_FAINT}"/>')
        lines.append(_text(x, bottom + 12, f"{share:.0%}", _Style(9, "middle")))
    return lines, bottom + 20


# ---------------------------------------------------------------- matrix


def _heat(document: Mapping[str, Any]) -> tuple[list[str], float]:
    matrix = document.get("matrix")
    if not matrix:
        return [], 0
    settings = list(matrix["ranks"])
    policies = list(matrix["cells"])
    left = 250
    cell = min(150.0, (WIDTH - left - _MARGIN) / len(settings))
    heading = f"Mean {matrix['metric']} of each policy under each setting (#: its rank there)"
    lines = [_text(_MARGIN, 12, heading, _HEADING)]
    for column, setting in enumerate(settings):
        x = left + column * cell + cell / 2
        lines.append(_text(x, 34, _cut(setting, cell - 6), _MIDDLE, setting))
    for row, policy in enumerate(policies):
        y = 42 + row * 36
        lines.append(_text(left - 8, y + 22, _cut(policy, left - 40), _RIGHT, policy))
        for column, setting in enumerate(settings):
            lines += _heat_cell(matrix, policy, setting, (left + column * cell, y, cell))
    return lines, 42 + 36 * len(policies) + 8


def _heat_cell(
    matrix: Mapping[str, Any], policy: str, setting: str, place: tuple[float, float, float]
) -> Iterator[str]:
    x, y, width = place
    found = matrix["cells"][policy][setting]
    known = [c[setting]["value"] for c in matrix["cells"].values() if c[setting] is not None]
    if found is None:
        yield _box(place, "#ffffff", _FAINT)
        yield _text(x + width / 2, y + 22, "—", _MIDDLE)
        return
    low, high = min(known), max(known)
    share = (found["value"] - low) / (high - low) if high > low else 0.0
    fill = _shade(share)
    ink = "#ffffff" if share > 0.55 else _INK
    rank = matrix["ranks"][setting][policy]
    yield _box(place, fill, "#ffffff")
    value = f"{found['value']:.3f}  #{rank}"
    yield _text(x + width / 2, y + 16, value, _Style(11, "middle", ink, "bold"))
    if found["low"] is not None:
        interval = f"[{found['low']:.3f}, {found['high']:.3f}]"
        yield _text(x + width / 2, y + 30, interval, _Style(9, "middle", ink))


def _box(place: tuple[float, float, float], fill: str, stroke: str) -> str:
    x, y, width = place
    size = f'width="{width:g}" height="36"'
    return f'<rect x="{x:g}" y="{y:g}" {size} fill="{fill}" stroke="{stroke}"/>'


def _shade(share: float) -> str:
    """From nearly white to dark blue; a column is scaled by itself, as its numbers are."""
    pale, dark = (232, 241, 248), (0, 82, 130)
    return "#" + "".join(
        f"{round(p + (d - p) * share):02x}" for p, d in zip(pale, dark, strict=True)
    )


# ---------------------------------------------------------------- words


def _text(x: float, y: float, text: str, style: _Style | None = None, title: str = "") -> str:
    """Words at a place; ``title`` is what they stand for in full, where they are cut."""
    style = style or _Style()
    more = f"<title>{escape(title)}</title>" if title and title != text else ""
    attributes = (
        f'x="{x:g}" y="{y:g}" font-size="{style.size}" fill="{style.fill}" '
        f'text-anchor="{style.anchor}" font-weight="{style.weight}"'
    )
    return f"<text {attributes}>{more}{escape(text)}</text>"


def _cut(text: str, width: float) -> str:
    """As much of the text as fits, by a guess at its width."""
    most = max(int(width / _CHARACTER), 4)
    return text if len(text) <= most else text[: most - 1] + "…"
