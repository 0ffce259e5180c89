"""What a terminal shows of a rescoring.

In: a plan, or a document. Out: lines; the last ones say what to do next.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.rescoring.planning import Planned
from flows.rescoring.settings import OWN
from refiner_core.rescoring.table import (
    AGREEMENT_HEADER,
    COMPARISON_HEADER,
    JUDGING_HEADER,
    agreement_rows,
    comparison_rows,
    fidelity_line,
    judging_rows,
    matrix_rows,
    reversal_lines,
)

#: Rubrics whose agreement is shown one by one; the table has all.
_CRITERIA = 8


def plan_lines(planned: Planned) -> Iterator[str]:
    """What would be read and asked."""
    for policy in planned.policies:
        steps = f", steps {policy.steps[0]} to {policy.steps[-1]}" if policy.steps else ""
        groups = len({r.group for r in policy.rollouts})
        yield f"{policy.name}: {len(policy.rollouts)} rollouts in {groups} groups{steps}"
    yield "settings: " + "; ".join(setting.name for setting in planned.settings)
    for plan in planned.judges.values():
        if not plan.questions:
            continue
        known = f"{plan.reused} of {len(plan.questions)} questions are answered already"
        if not plan.served:
            yield f"{plan.name}: {known}, {len(plan.unknown)} are judged here, without calls"
            continue
        kept = f", {plan.kept} are in the workspace's store" if plan.kept else ""
        tokens = f" (about {plan.prompt_tokens:,} tokens of prompts)" if plan.calls else ""
        yield f"{plan.name}: {known}{kept}; {plan.calls} calls{tokens}"


def document_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The result."""
    for name, found in document["fidelity"].items():
        yield ("" if found["sound"] else "warning: ") + fidelity_line(name, found)
    for policy in document["policies"]:
        if rows := comparison_rows(document, policy["name"]):
            baseline = next(
                c["baseline"] for c in document["comparisons"] if c["policy"] == policy["name"]
            )
            yield ""
            yield f"{policy['name']}, compared with {baseline}:"
            yield from padded(COMPARISON_HEADER, rows)
    if document["comparisons"]:
        yield "  (best changes: groups that share no best sample with the baseline; no signal:"
        yield "  groups without spread; in brackets 95 % over prompts)"
    for entry in document["comparisons"]:
        if entry["agreement"]:
            yield ""
            yield f"Agreement of the judges, {entry['policy']}, {entry['setting']}:"
            yield from padded(AGREEMENT_HEADER, agreement_rows(entry)[:_CRITERIA])
    if document["matrix"] is not None:
        yield ""
        yield f"Mean {document['matrix']['metric']}:"
        yield from padded(*matrix_rows(document))
        yield from reversal_lines(document)
    if document["judging"]:
        yield ""
        yield from padded(JUDGING_HEADER, judging_rows(document))
        yield judged_line(document)


def judged_line(document: Mapping[str, Any]) -> str:
    """In one sentence, whether anybody was asked."""
    bills = document["judging"]
    asked = sum(bill["asked"] for bill in bills if bill["calls"])
    if not asked:
        return "No server was asked: all judgements were known, or need none."
    calls, seconds = sum(b["calls"] for b in bills), sum(b["seconds"] for b in bills)
    failed = sum(bill["failed"] for bill in bills)
    lost = f"; {failed} failed, and their rollouts are unscored" if failed else ""
    return f"{asked} questions were asked in {calls} calls, {seconds:.1f} s{lost}."


def next_lines(
    document: Mapping[str, Any], folder: Path, words: Sequence[str], begun_with: Sequence[str]
) -> Iterator[str]:
    """Where the files are, and commands that make sense now; ``words`` are those of this call,
    ``begun_with`` the overrides of the first run, which a run like it needs too."""
    yield ""
    yield f"Files: {folder}/ (rescore.json, rewards.parquet, table.md, figure.svg)"
    yield "Next:"
    if not document["comparisons"]:
        tried = ["--rubrics", "v3", "--citation-weight", "0.5"]
        yield f"  {shlex.join(['refiner', 'rescore', *words, *tried])}"
        return
    yield f"  less {shlex.quote(str(folder / 'table.md'))}"
    own = document["settings"][0]
    where = [word for word in words if word.startswith("workspace=")]
    for setting in document["settings"]:
        overrides = _overrides(own, setting)
        # A judge's address is no part of what a setting is, so only rewards are proposed.
        same_judge = setting["judge"] == own["judge"]
        if not setting["name"].startswith(OWN) and overrides and same_judge:
            recipe = document["policies"][0]["recipe"]
            changed = tuple(override.partition("=")[0] + "=" for override in overrides)
            kept = [o for o in begun_with if not o.startswith(("workspace=", *changed))]
            yield f"  {shlex.join(['refiner', 'plan', recipe, *where, *kept, *overrides])}"
            return


def _overrides(own: Mapping[str, Any], setting: Mapping[str, Any]) -> list[str]:
    """The setting's rewards as overrides of a recipe."""
    return [
        f"reward.{name}={_value(value)}"
        for name, value in setting["reward"].items()
        if own["reward"].get(name) != value
    ]


def _value(value: Any) -> str:
    """As it is written in an override."""
    known = {None: "null", True: "true", False: "false"}
    return known[value] if value is None or isinstance(value, bool) else str(value)


def padded(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A plain table."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        yield "  " + "  ".join(cells).rstrip()
