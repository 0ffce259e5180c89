"""What a sweep was launched as: its versions, the code that its runs use, its plan from a record.

In: a :class:`SweepPlan`, or a :class:`SweepRecord`. Out: the other. A version is written only where
something is different from the newest one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.running.recording import Pinned, pin_code
from infra.store import atomic
from infra.store.layout import sweep_call
from infra.store.orchestrators import require_idle
from infra.store.room import no_space_guard
from infra.store.snapshot import snapshot_code
from infra.store.sweep_records import read_sweep, sweep_folder, sweep_versions, write_sweep
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.records import from_json, to_json
from refiner_core.contract.sweep_records import (
    SWEEP_VERSION,
    ArmRecord,
    SweepRecord,
    TrialRecord,
)
from sweeps.values import SweepPlan

#: What may differ between two records of one version.
_OF_THE_LAUNCH = ("number", "folder", "forecast", "code", "started_at", "provenance")


def record_version(
    plan: SweepPlan,
    workspace: Workspace,
    overrides: Sequence[str],
    forecast: Mapping[str, Any],
    *,
    take_over: bool = False,
) -> SweepRecord:
    """The newest version of the sweep, written now if anything is different from the last one.

    Raises
    ------
    ConfigurationError
        Another process works on the sweep.
    """
    name = plan.sweep.name
    require_idle(workspace, sweep_call(name), regardless=take_over)
    while True:
        versions = sweep_versions(workspace, name)
        newest = read_sweep(workspace, name) if versions else None
        record = _record_of(plan, workspace, overrides, forecast, (versions or [0])[-1] + 1)
        if newest is not None and _same(newest, record):
            return newest
        code = pin_for(workspace, name)
        record = replace(
            record, code=code.code, provenance={**code.provenance, **record.provenance}
        )
        if write_sweep(workspace, record):
            return record


def _record_of(
    plan: SweepPlan,
    workspace: Workspace,
    overrides: Sequence[str],
    forecast: Mapping[str, Any],
    number: int,
) -> SweepRecord:
    sweep = plan.sweep
    return SweepRecord(
        version=SWEEP_VERSION,
        number=number,
        name=sweep.name,
        recipe=sweep.recipe,
        folder=str(Path.cwd()),
        text=sweep.text,
        arms=tuple(ArmRecord(a.name, dict(a.levels), dict(a.changes)) for a in plan.arms),
        baseline=plan.baseline,
        seeds=tuple(sweep.seeds),
        trials=tuple(
            TrialRecord(t.arm, t.seed, t.overrides, {s.name: s.id for s in t.plan.stages})
            for t in plan.trials
        ),
        limits=to_json(sweep.limits),
        question=_question_of(plan),
        forecast=forecast,
        code="",
        started_at=now_text(),
        provenance={"overrides": list(overrides), "origin": sweep.origin},
    )


def _question_of(plan: SweepPlan) -> dict[str, Any]:
    """The question; ``measured_as`` names the protocol whose numbers answer it, where the one that
    it names measures as that does (empty: the recipe's own), and so has no stages of its own."""
    asked: dict[str, Any] = to_json(plan.sweep.question)
    first, named = plan.trials[0].plan, plan.sweep.question.protocol
    models = dict.fromkeys(s.model for s in first.stages if s.kind == "evaluate")
    found = (first.evaluation(model, named) for model in models)
    stage = next(filter(None, found), None)
    if named and stage is not None and stage.protocol != named:
        asked["measured_as"] = stage.protocol
    return asked


def _same(one: SweepRecord, other: SweepRecord) -> bool:
    """Whether two versions are the same sweep, whenever and from wherever they were launched."""
    texts = []
    for record in (one, other):
        what = {k: v for k, v in to_json(record).items() if k not in _OF_THE_LAUNCH}
        for trial in what["trials"]:  # the workspace may be mounted elsewhere by now
            trial["overrides"] = [o for o in trial["overrides"] if not o.startswith("workspace=")]
        texts.append(json.dumps(what, sort_keys=True, default=str))
    return texts[0] == texts[1]


def pin_for(workspace: Workspace, name: str) -> Pinned:
    """The code as it is now, and where it comes from, kept beside the sweep: who works on it in the
    background imports the snapshot, and knows nothing of a checkout."""
    code = snapshot_code(workspace)
    path = sweep_folder(workspace, name) / "pinned" / f"{code.id}.json"
    if (found := workspace.read_control(path)) is not None:
        return from_json(Pinned, found)
    pinned = pin_code(workspace)
    with no_space_guard(workspace.root, "pinning the code"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(path, to_json(pinned))
    return pinned


def plan_of_record(workspace: Workspace, record: SweepRecord) -> SweepPlan:
    """The plan of a recorded version, from its text.

    Raises
    ------
    ConfigurationError
        What its trials are made from is not what it was; says which.
    """
    from flows.sweeping.planning import plan_of
    from sweeps.definition import parse_sweep

    overrides = [str(text) for text in record.provenance.get("overrides") or ()]
    origin = str(record.provenance.get("origin") or "")
    place = f"workspace={workspace.root}"
    plan = plan_of(parse_sweep(record.text, record.name, origin), [*overrides, place])
    now = {t.name: {s.name: s.id for s in t.plan.stages} for t in plan.trials}
    other = [t.name for t in record.trials if now.get(t.name) != dict(t.stages)]
    if other:
        shown = ", ".join(other[:5]) + (f" and {len(other) - 5} more" if len(other) > 5 else "")
        raise ConfigurationError(
            f"Sweep {record.name} cannot be resumed as it was: what {len(other)} of its "
            f"{len(record.trials)} trials are made from has changed since ({shown}).",
            expected="the recipe, rows, weights, rubrics and protocols that it was launched with",
            fix="bring these back, or launch it as it is now: refiner sweep "
            f"{origin or record.name}",
        )
    return plan


@contextlib.contextmanager
def in_folder(folder: str) -> Iterator[None]:
    """Work where the sweep was launched, if that folder is still there: paths may be relative."""
    if not folder or not Path(folder).is_dir():
        yield
        return
    with contextlib.chdir(folder):
        yield


def dispatch_of(workspace: Workspace, record: SweepRecord) -> dict[str, Any]:
    """The ``dispatch`` section of a recorded sweep's recipe."""
    with in_folder(record.folder):
        plan = plan_of_record(workspace, record)
    value: dict[str, Any] = to_json(plan.trials[0].plan.config.dispatch)
    return value
