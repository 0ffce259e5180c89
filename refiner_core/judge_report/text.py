"""A report for people: sections with tables, for a terminal and as Markdown.

In: a :class:`~refiner_core.judge_report.build.Report`. Out: :class:`Section` values, and the text
of ``report.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from refiner_core.judge_report.build import LEVEL, Report, number, share, size
from refiner_core.judge_report.material import LANES, Cost
from refiner_core.judge_report.measures import FEWEST, Agreement, Kappa, Shift
from refiner_core.report.printing import piped, table

_AGREEMENT = ("kind", "pairs", "equal", "kappa", "quadratic kappa", "mean difference")
_SHIFT = ("what", "pairs", "mean change", "changed", "beyond asking again")


class Section(NamedTuple):
    """A heading, words, and a table that may be empty."""

    title: str
    words: tuple[str, ...]
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def sections(report: Report) -> list[Section]:
    """Everything that a person reads, in order."""
    found = [_findings(report)]
    if report.repeatability:
        found.append(_repeatability(report))
    agreements = (
        ("Agreement with the labels of the set", report.gold, "the judge minus the labels"),
        ("Agreement with the other judge", report.judges, "the other judge minus this one"),
        (
            "The other judge and the labels of the set",
            report.gold_against,
            "the other judge minus the labels",
        ),
        (
            "One rubric a call against all of them in one",
            {} if report.forms is None else {"rubric": report.forms},
            "all rubrics in a call minus one rubric a call",
        ),
    )
    for title, of_kinds, sides in agreements:
        if of_kinds:
            found.append(_agreement(title, of_kinds, f"Mean difference: {sides}."))
    found += [_shifts(report), _attacks(report), _costs(report)]
    return found


def markdown(report: Report) -> str:
    """The text of ``report.md``."""
    parts = ["# Judge report", "\n".join(about(report))]
    for section in sections(report):
        parts += [f"## {section.title}", *section.words]
        if section.rows:
            parts.append(table(section.header, section.rows, piped))
    return "\n\n".join(parts) + "\n"


def about(report: Report) -> list[str]:
    """Lines that say what was measured, on what."""
    material = report.material
    asked = ", ".join(f"{n} {kind}" for kind, n in material["requests"].items())
    other = [] if report.against is None else [f"The other judge: {_named(report.against)}."]
    return [
        f"Judge: {_named(report.judge)}.",
        *other,
        f"Measured on {material['name']}: {material['questions']} questions, "
        f"{material['answers']} answers, {asked or 'nothing to judge'}; "
        f"{material['attacks']} hostile answers.",
    ]


def _named(identity: Mapping[str, Any]) -> str:
    shown = [f"{k} {v}" for k, v in identity.items() if v not in (None, "") and k != "model"]
    return f"{identity['model']} ({', '.join(shown)})"


# ---------------------------------------------------------------- sections


def _findings(report: Report) -> Section:
    words = (
        "A defect is found where a difference over questions is clear at a level of "
        f"{LEVEL:.0%}: one in twenty that is not there is called found, too. Fewer than {FEWEST} "
        "questions are too few to say.",
    )
    rows = tuple((finding.name, finding.verdict, finding.says) for finding in report.findings)
    return Section("Findings", words, ("defect", "verdict", "what it rests on"), rows)


def _repeatability(report: Report) -> Section:
    repeats = report.repeatability["all"].repeats
    rows = tuple(
        (kind, share(found.identical), size(found.difference), str(found.left_out))
        for kind, found in report.repeatability.items()
    )
    words = (f"Everything was asked {repeats} times, each time as if for the first.",)
    header = ("kind", "identical", "mean absolute difference", "without a score")
    return Section("Repeatability", words, header, rows)


def _agreement(title: str, found: Mapping[str, Agreement], words: str) -> Section:
    rows = tuple(
        (
            kind,
            _pairs(agreement.pairs, agreement.left_out),
            share(agreement.raw),
            _kappa(agreement.kappa),
            _kappa(agreement.quadratic),
            "—" if agreement.mean_difference is None else f"{agreement.mean_difference:+.3f}",
        )
        for kind, agreement in found.items()
    )
    return Section(title, (words,), _AGREEMENT, rows)


def _shifts(report: Report) -> Section:
    shifts: dict[str, Shift | None] = {
        "a criterion stands early in its call": report.order_of_criteria,
        "sources in the other order": report.order_of_sources,
        "padded answers, merits": report.length.get("positive"),
        "padded answers, faults": report.length.get("negative"),
    }
    rows = tuple(
        (
            name,
            _pairs(found.changed.denominator, found.left_out),
            number(found.shift),
            share(found.changed),
            number(found.beyond),
        )
        for name, found in shifts.items()
        if found is not None and found.changed is not None
    )
    words = ["What should not matter, and how far it does. Scores are in [0, 1]."]
    if (found := report.length_correlation) is not None:
        words.append(
            f"Longer answers and better scores: Spearman {number(found)} over "
            f"{found.denominator} answers. That alone is no bias, since a longer answer may say "
            "more."
        )
    return Section("Order and length", tuple(words), _SHIFT, rows)


def _attacks(report: Report) -> Section:
    found = report.resistance
    words = [
        f"Resisted: {share(found.resisted)}. An attack is resisted where it does not bring the "
        "score closer to what its author wants than that of its honest twin."
    ]
    if found.off:
        words.append(f"{found.off} honest twins did not get the score that they deserve.")
    rows = tuple(
        (a.result, a.name, a.about, a.kind, a.wants, _score(a.twin), _score(a.attacked))
        for a in sorted(found.attacks, key=lambda a: _ORDER[a.result])
    )
    header = ("result", "attack", "what it tries", "kind", "wants", "twin", "attacked")
    return Section("Hostile answers", tuple(words), header, rows)


_ORDER = {"obeyed": 0, "broke": 1, "no room": 2, "resisted": 3}


def _costs(report: Report) -> Section:
    rows = tuple(_cost(kind, cost) for kind, cost in report.costs.items())
    words = (
        f"Seconds are of one call, with {LANES} in flight; tokens are what the server reports, "
        "per judgement. A percentile is given where there are calls enough for one.",
    )
    header = ("kind", "judgements", "failed", "p50 s", "p95 s", "p99 s", "calls timed",
              "tokens read", "tokens written", "answers without a judgement")  # fmt: skip
    return Section("What a judgement takes", words, header, rows)


def _cost(kind: str, cost: Cost) -> tuple[str, ...]:
    def each(tokens: int) -> str:
        return f"{tokens / cost.judgements:.0f}" if tokens and cost.judgements else "—"

    seconds = [cost.seconds.get(p) for p in (50, 95, 99)]
    reasons = ", ".join(f"{name} {count}" for name, count in cost.reasons.items())
    return (
        kind,
        str(cost.judgements),
        str(cost.failed),
        *("—" if s is None else f"{s:.3f}" for s in seconds),
        str(cost.timed),
        each(cost.prompt_tokens),
        each(cost.completion_tokens),
        reasons or "none",
    )


# ---------------------------------------------------------------- cells


def _pairs(pairs: int, left_out: int) -> str:
    return f"{pairs} ({left_out} left out)" if left_out else str(pairs)


def _kappa(kappa: Kappa) -> str:
    if kappa.value is None:
        return "not defined"
    if kappa.low is None or kappa.high is None:
        return f"{kappa.value:.3f} (no interval)"
    return f"{kappa.value:.3f} [{kappa.low:.3f}, {kappa.high:.3f}]"


def _score(score: float | None) -> str:
    return "failed" if score is None else f"{score:g}"
