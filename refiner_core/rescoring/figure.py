"""The figure of a rescoring, as one SVG file that needs nothing else.

In: the document (:mod:`refiner_core.rescoring.document`) and the pairs of advantages behind it.
Out: text. From top to bottom: advantages under the baseline against those under each setting, the
share of groups whose best sample changes, and the judge x policy matrix. Every mark has its number
beside it, so that nothing is told by colour alone (colours: Okabe and Ito's, "Color Universal
Design", 2008).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from refiner_core.rescoring.compare import sign_changes

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
            lines += _cell(matrix, policy, setting, (left + column * cell, y, cell))
    return lines, 42 + 36 * len(policies) + 8


def _cell(
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
