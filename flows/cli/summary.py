"""Summary of a finished run: one table of numbers, and where its models lie.

In: a :class:`flows.api.RunOutcome`. Out: lines for a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flows.evaluations import evaluations_of
from flows.running.calls import RunOutcome
from infra.store.workspace import Workspace
from refiner_core.evaluation.metrics import main_metrics
from refiner_core.report.printing import measured, table_lines


def summary_lines(outcome: RunOutcome) -> Iterator[str]:
    """Rows kept, numbers by model and decoding with 95 % intervals, what is published where."""
    workspace = Workspace.read_only(outcome.plan.config.workspace)
    yield from _rows_kept(outcome)
    yield from _attempts_kept(outcome)
    numbers = evaluations_of(outcome.plan, workspace)
    for under, decoding in dict.fromkeys((n["under"], n["decoding"]) for n in numbers):
        here = [n for n in numbers if (n["under"], n["decoding"]) == (under, decoding)]
        agent = bool(outcome.plan.config.environment.name)
        measured = f"protocol {under}" if under else f"held-out {'tasks' if agent else 'prompts'}"
        yield ""
        yield f"{decoding} decoding, {measured} (95 % interval)"
        yield from _table(here)
    yield from _damages(outcome, workspace)
    yield from _publications(outcome, workspace)


def _damages(outcome: RunOutcome, workspace: Workspace) -> Iterator[str]:
    """Finished stages whose output is not what it was, and how to make it again."""
    for view in outcome.views.values():
        stage_id = outcome.plan.by_name[view.name].id
        if damage := workspace.output_damage(stage_id):
            folder = workspace.layout.stage(stage_id).control
            yield ""
            yield f"{view.name} is done, but {damage}. To make it again: delete {folder}"


def _publications(outcome: RunOutcome, workspace: Workspace) -> Iterator[str]:
    """One line for each publication that is there, by step; what the repository ends at is last."""
    made = []
    for view in outcome.views.values():
        stage_id = outcome.plan.by_name[view.name].id
        there = view.kind == "publish" and "target" in view.report
        if there and workspace.output_damage(stage_id) is None:
            made.append(view.report)
    if made:
        yield ""
    for report in sorted(made, key=lambda r: (bool(r.get("final")), int(r.get("step") or 0))):
        yield f"published: {report['target']} ({_which(report)})"


def _which(report: Mapping[str, Any]) -> str:
    said = [f"step {report['step']}"] if "step" in report else []
    if report.get("revision", "main") != "main":
        said.append(f"revision {report['revision']}")
    if report.get("best"):
        said.append(
            f"the best of {len(report['best']['candidates'])} by {report['best']['metric']}"
        )
    return ", ".join(said) or "the last step"


def _rows_kept(outcome: RunOutcome) -> Iterator[str]:
    """Rows that the data stage kept and dropped, and why."""
    data = outcome.views.get("data")
    report = data.report if data is not None else {}  # another trainer brings its own data
    for which, label in (("sft", "demonstrations"), ("rl", "prompts")):
        counts = report.get(which) or {}
        if not counts.get("read"):
            continue
        dropped = [f"{n} {reason}" for reason, n in sorted((counts.get("dropped") or {}).items())]
        why = f" (dropped: {', '.join(dropped)})" if dropped else ""
        yield f"{counts['kept']} of {counts['read']} {label} kept{why}"


def _attempts_kept(outcome: RunOutcome) -> Iterator[str]:
    """Attempts that the sample stage kept."""
    sampled = outcome.views.get("sample")
    report = sampled.report if sampled is not None else {}
    if not report.get("kept"):
        return
    kept, attempts, prompts = report["kept"], report["attempts"], report["prompts"]
    yield (
        f"{kept['demonstrations']} of {attempts['total']} attempts kept "
        f"({kept['full_success']} full successes, {kept['best_partial']} best partial ones) at "
        f"{prompts['total']} prompts, {prompts['full']} of them solved"
    )


def _table(numbers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    models = list(dict.fromkeys(n["stage"] for n in numbers))
    shown = main_metrics(str(n["metric"]) for n in numbers)
    values = {(n["stage"], n["metric"]): measured(n) for n in numbers}
    rows = [[model, *(values.get((model, m), "") for m in shown)] for model in models]
    return table_lines(rows, ["", *shown])
