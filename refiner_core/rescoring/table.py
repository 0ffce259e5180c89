"""A rescoring as tables for people.

In: the document (:mod:`refiner_core.rescoring.document`). Out: ``table.md``; and the rows that a
terminal shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
            yield from table(COMPARISON_HEADER, rows)
            yield ""
    for entry in document["comparisons"]:
        if entry["agreement"]:
            yield f"## Agreement of the judges: {entry['policy']}, {entry['setting']}"
            yield ""
            yield from table(AGREEMENT_HEADER, agreement_rows(entry))
            yield ""
    if document["matrix"] is not None:
        yield f"## Policies under each setting (mean {document['matrix']['metric']})"
        yield ""
        yield from table(*matrix_rows(document))
        yield ""
        yield from (f"- {line}" for line in reversal_lines(document))
        yield ""
    if document["judging"]:
        yield "## Judging"
        yield ""
        yield from table(JUDGING_HEADER, judging_rows(document))
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


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown."""
    yield "| " + " | ".join(map(_cell, header)) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(map(_cell, row)) + " |"


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
