"""`refiner status` and `refiner logs`: what became of the stages of a run. Reads records only."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import json_option, print_json, print_table, split_workspace

if TYPE_CHECKING:
    from infra.workspace import Workspace
    from refiner_core.contract.records import RunRecord, StageRecord

_FOLLOW_S = 0.5
_KINDS = ("data", "sft", "grpo", "publish", "evaluate", "card")


@click.command("status")
@click.argument("words", nargs=-1, metavar="[RUN] [workspace=DIR]")
@click.option("--workspace", "folder", help="the same as workspace=DIR")
@json_option
def status_command(words: tuple[str, ...], folder: str | None, as_json: bool) -> None:
    """Show the stages of RUN (default: the newest) and how each attempt went."""
    from infra.workspace import Workspace

    where, rest = split_workspace(words)
    workspace = Workspace.read_only(folder or where)
    run = _chosen_run(workspace, rest[0] if rest else None)
    if run is None:
        if as_json:
            print_json({"version": 1, "run": None, "stages": []})
        else:
            click.echo(f"No run is recorded in {workspace.root}.")
            click.echo("Next:\n  refiner run tiny", err=True)
        return
    stages = stage_rows(workspace, run)
    if as_json:
        print_json({"version": 1, "run": run.run, "recipe": run.recipe, "stages": stages})
        return
    click.echo(f"{run.run}: {shlex.join(run.command)}")
    header = ("stage", "state", "attempt", "progress", "seconds", "last word")
    print_table([[_cell(s[h]) for h in ("name", *header[1:])] for s in stages], header)
    others = [r for r in workspace.run_ids() if r != run.run]
    if others:
        click.echo(f"\n{len(others)} other runs, the newest: {', '.join(others[-3:])}", err=True)


def stage_rows(workspace: Workspace, run: RunRecord) -> list[dict[str, Any]]:
    """One row per stage of a run: state, attempt, progress, seconds, and how the last one ended."""
    from infra.dispatch import SubmititDispatcher
    from infra.observe import Observer

    timeout_s = float(run.config.get("dispatch", {}).get("heartbeat_timeout_s", 900.0))
    observer = Observer(workspace, SubmititDispatcher(workspace), timeout_s)
    records, observed = observer.look(run.stages.values())
    rows = []
    for name, stage_id in sorted(run.stages.items(), key=lambda item: _order(item[1])):
        record, seen = records.get(stage_id), observed.attempts.get(stage_id)
        state: str = "waiting" if record is None else record.state
        if seen is not None:
            state = {"live": "running", "hung": "hung", "dead": "killed"}.get(seen.sight, state)
        rows.append({"name": name, "id": stage_id, "state": state, **_details(workspace, record)})
    return rows


def _order(stage_id: str) -> int:
    """Position of a stage's kind in a plan; stage ids begin with the kind."""
    return _KINDS.index(stage_id.rpartition("-")[0])


def _details(workspace: Workspace, record: StageRecord | None) -> dict[str, Any]:
    if record is None or not record.attempts:
        return {"attempt": 0, "progress": "", "seconds": None, "last word": "", "attempts": []}
    from refiner_core.contract.records import to_json

    last = record.attempts[-1]
    stage_id = f"{record.spec.kind}-{record.spec.fingerprint[:12]}"
    beat = workspace.read_heartbeat(stage_id, last.number) or {}
    progress = beat.get("progress") or {}
    under_way = record.result is None and progress.get("total")
    shown = f"{progress['done']}/{progress['total']}" if under_way else ""
    return {
        "attempt": last.number,
        "progress": shown,
        "seconds": round(record.result.seconds, 1) if record.result else beat.get("seconds"),
        "last word": last.outcome.message if last.outcome else "",
        "attempts": to_json(record.attempts),
    }


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def _chosen_run(workspace: Workspace, wanted: str | None) -> RunRecord | None:
    if wanted is not None:
        return workspace.read_run(wanted)
    runs = workspace.run_ids()
    return workspace.read_run(runs[-1]) if runs else None


@click.command("logs")
@click.argument("stage", metavar="STAGE")
@click.argument("words", nargs=-1, metavar="[RUN] [workspace=DIR]")
@click.option("-f", "--follow", is_flag=True, help="go on printing until the stage ends")
def logs_command(stage: str, words: tuple[str, ...], follow: bool) -> None:
    """Print the log of STAGE's newest attempt in RUN (default: the newest run)."""
    from infra.workspace import Workspace
    from refiner_core.contract.errors import ConfigurationError

    where, rest = split_workspace(words)
    workspace = Workspace.read_only(where)
    run = _chosen_run(workspace, rest[0] if rest else None)
    names = {} if run is None else run.stages
    stage_id = names.get(stage) or (stage if stage in workspace.stage_ids() else None)
    if stage_id is None:
        raise ConfigurationError(
            f"There is no stage {stage!r} in {'any run' if run is None else f'run {run.run}'} of "
            f"{workspace.root}.",
            expected=f"one of: {', '.join(names) or '(no run is recorded)'}",
            fix="name one of these, another run, or another workspace=DIR",
        )
    numbers = workspace.layout.stage(stage_id).attempt_numbers()
    if not numbers:
        click.echo(f"{stage} has not been started yet.", err=True)
        return
    path = workspace.layout.attempt(stage_id, numbers[-1]).log
    click.echo(f"{path} (attempt {numbers[-1]})", err=True)
    for text in _follow(workspace, stage_id, numbers[-1], path) if follow else [_read(path)]:
        sys.stdout.write(text)
        sys.stdout.flush()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _follow(workspace: Workspace, stage_id: str, number: int, path: Path) -> Iterator[str]:
    """What is in the log and what comes, until the attempt has an outcome."""
    printed = 0
    while True:
        attempt = workspace.read_attempt(stage_id, number)
        text = _read(path)
        yield text[printed:]
        printed = len(text)
        if attempt is None or attempt.outcome is not None:
            return
        time.sleep(_FOLLOW_S)
