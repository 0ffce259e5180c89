"""A report for people: sections with tables, for a terminal and as Markdown.

In: a :class:`~refiner_core.judge_report.build.Report`. Out: :class:`Section` values, and the text
of ``report.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from refiner_core.evaluation.statistics import Estimate
from refiner_core.judge_report.build import LEVEL, Report, number, share
from refiner_core.judge_report.material import LANES
from refiner_core.judge_report.measures import FEWEST, Agreement, Kappa, Shift
from refiner_core.report import printing
from refiner_core.report.printing import MISSING, piped, table

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
    found = [
        Section(
            "Findings",
            (
                "A defect is found where a difference over questions is clear at a level of "
                f"{LEVEL:.0%}: one in twenty that is not there is called found, too. Fewer than "
                f"{FEWEST} questions are too few to say.",
            ),
            ("defect", "verdict", "what it rests on"),
            report.findings,
        )
    ]
    if report.repeatability:
        repeats = report.repeatability["all"].repeats
        rows = tuple(
            (kind, share(one.identical), _size(one.difference), str(one.left_out))
            for kind, one in report.repeatability.items()
        )
        words = (f"Everything was asked {repeats} times, each time as if for the first.",)
        header = ("kind", "identical", "mean absolute difference", "without a score")
        found.append(Section("Repeatability", words, header, rows))
    forms = {} if report.forms is None else {"rubric": report.forms}
    one_call = "all rubrics in a call minus one rubric a call"
    for title, of_kinds, sides in (
        ("Agreement with the labels of the set", report.gold, "the judge minus the labels"),
        ("Agreement with the other judge", report.judges, "the other judge minus this one"),
        ("The other judge and the labels of the set", report.gold_against,
         "the other judge minus the labels"),
        ("One rubric a call against all of them in one", forms, one_call),
    ):  # fmt: skip
        if of_kinds:
            cells = tuple(_agreement(kind, one) for kind, one in of_kinds.items())
            found.append(Section(title, (f"Mean difference: {sides}.",), _AGREEMENT, cells))
    return [*found, _shifts(report), _attacks(report), _costs(report)]


def _agreement(kind: str, found: Agreement) -> tuple[str, ...]:
    milder = printing.number(found.mean_difference, signed=True)
    kappas = (_kappa(found.kappa), _kappa(found.quadratic))
    return kind, _pairs(found.pairs, found.left_out), share(found.raw), *kappas, milder


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
    words = (
        f"Seconds are of one call, with {LANES} in flight; tokens are what the server reports, "
        "per judgement. A percentile is given where there are calls enough for one.",
    )
    header = ("kind", "judgements", "failed", "p50 s", "p95 s", "p99 s", "calls timed",
              "tokens read", "tokens written", "answers without a judgement")  # fmt: skip
    rows = tuple(
        (
            kind,
            *map(str, (cost.judgements, cost.failed)),
            *(printing.number(cost.seconds.get(p)) for p in (50, 95, 99)),
            str(cost.timed),
            *(
                f"{tokens / cost.judgements:.0f}" if tokens and cost.judgements else MISSING
                for tokens in (cost.prompt_tokens, cost.completion_tokens)
            ),
            ", ".join(f"{name} {count}" for name, count in cost.reasons.items()) or "none",
        )
        for kind, cost in report.costs.items()
    )
    return Section("What a judgement takes", words, header, rows)


# ---------------------------------------------------------------- cells


def _pairs(pairs: int, left_out: int) -> str:
    return f"{pairs} ({left_out} left out)" if left_out else str(pairs)


def _size(value: Estimate | None) -> str:
    return MISSING if value is None else printing.with_interval(*value[:3])


def _kappa(kappa: Kappa) -> str:
    if kappa.value is None:
        return "not defined"
    return printing.with_interval(*kappa) + (" (no interval)" if kappa.low is None else "")


def _score(score: float | None) -> str:
    return "failed" if score is None else f"{score:g}"
