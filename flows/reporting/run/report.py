"""Report of a run, gathered from its records, and its files: ``report.html``, ``report.md``,
``report.json``.

In: a workspace and the id of a run. Out: a :class:`~refiner_core.report.run.run_report.RunReport`,
and its files below ``WORKSPACE/reports/RUN`` or another folder, each complete or absent. A report
may be shared: logins in addresses, and settings for secrets, are left out. Stages that existed
before the run cost it nothing, nor do earlier runs' attempts at the others. Unknown counts are
None.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.checking.attacks import attack_notes
from flows.reporting.run.all_samples import write_samples_page
from flows.reporting.run.results import (
    ModelEvaluation,
    change_rows,
    evaluation_examples,
    evaluations_of_run,
    monitor_words,
    number_rows,
    rollout_examples,
    training_curves,
)
from flows.reporting.run.stages import (
    RunReading,
    incident_lines,
    last_event,
    look,
    stage_rows,
    standing_of,
)
from flows.reporting.writing import RELOAD_S, WrittenReport, write_files
from flows.running.status import required_run
from flows.runs.run_table import label_of
from flows.stored import recorded_field
from infra.disk.manager import DiskManager
from infra.disk.usage import KINDS, inventory_of, size_of
from infra.host.secrets import HIDDEN, carries_secrets, masked, masked_override, without_secrets
from infra.orchestrator.timeline import incidents_of
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.marks import walk
from refiner_core.contract.records import mapped, picked
from refiner_core.contract.services import is_service
from refiner_core.report.printing import total
from refiner_core.report.run.run_report import (
    NO_COST,
    NO_DISK,
    RUN_REPORT_VERSION,
    Row,
    RunReport,
    StageRow,
)
from refiner_core.report.sweep.sweep_report import PAGE, TEXT, VALUES

#: Fields that are in the head of a report.
_IN_THE_HEAD = ("recipe", "description", "workspace")


def masked_overrides(overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides as they were given, without secrets."""
    return tuple(map(masked_override, overrides))


def shown_setting(path: str, value: Any) -> Any:
    """A value of a field, without secrets."""
    return HIDDEN if carries_secrets(path) else _shown(value)


def changed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recorded recipe that differ from their defaults, by dotted name."""
    found: dict[str, Any] = {}
    for path, info in walk(RecipeConfig):
        value = recorded_field(config, path, info.default)
        if path not in _IN_THE_HEAD and value != recorded_field({}, path, info.default):
            found[path] = shown_setting(path, value)
    return found


def _shown(value: Any) -> Any:
    return mapped(value, lambda one: without_secrets(one) if isinstance(one, str) else one)


# ---------------------------------------------------------------- outputs


def publications(reading: RunReading) -> tuple[Row, ...]:
    """Publications, as recorded by their stages."""
    found = []
    for name, history in reading.of_kind("publish"):
        result = history.record.result
        if result is not None and result.report.get("target"):
            step = result.report.get("step")
            target = without_secrets(str(result.report["target"]))
            step = None if step is None else int(step)
            card = _card(reading, name)
            found.append({"stage": name, "target": target, "card": card, "step": step})
    return tuple(sorted(found, key=lambda p: (p["step"] is None, p["step"] or 0)))


def _card(reading: RunReading, publish: str) -> str:
    """The model card: from the card stage, else as first published."""
    for name in (publish.replace("publish", "card", 1), publish):
        folder = reading.output(name) if name in reading.histories else None
        if folder is not None and (folder / "README.md").is_file():
            return str(folder / "README.md")
    return ""


def next_commands(
    reading: RunReading, state: str, rows: Sequence[StageRow], published: Sequence[Row]
) -> tuple[str, ...]:
    """Useful next commands, most useful first."""
    where = [f"workspace={reading.workspace.root}"]
    run = reading.run.run
    commands: list[list[str]] = []
    if state == "running":
        commands += [["status", run, "--watch", *where], ["report", run, "--watch", *where]]
    commands += [["logs", row.name, *where] for row in rows if row.state == "failed"]
    if state in ("failed", "stopped"):
        commands += [["resume", run, *where], ["status", run, "--incidents", *where]]
    if state == "done":
        commands += [["card", "check", p["target"]] for p in published[-1:]]
        commands.append(["disk", *where])
    return tuple(shlex.join(["refiner", *command]) for command in commands)


#: A judge's counters that a report sums up.
_OF_JUDGE = (
    *("asked", "calls", "stored", "shared", "failed", "retries"),
    *("prompt_tokens", "completion_tokens"),
)


def cost_of_run(reading: RunReading, rows: Sequence[StageRow]) -> Row:
    """Sums over the stages that this run has worked on, from its start: earlier runs pay for their
    own failed attempts."""
    began_at = reading.run.started_at
    own = [row for row in rows if row.attempts and not row.skipped]
    shares = [_share(row, began_at) for row in own]
    sums = {
        name: total(
            None if (value := getattr(row, name)) is None else value * share
            for row, share in zip(own, shares, strict=True)
        )
        for name in ("seconds", "gpu_hours", "cpu_hours")
    }
    lost_seconds, lost_steps = 0.0, 0
    for row in own:
        history = reading.histories[row.name]
        every = reading.tried(f"The lost work of {row.name}", incidents_of, [history]) or []
        since = [i for i in every if i.at >= began_at]
        lost, of_all = (sum(i.lost_seconds or 0.0 for i in some) for some in (since, every))
        lost_seconds += row.lost_seconds * (lost / of_all if of_all else 1.0)
        lost_steps += sum(i.lost_steps or 0 for i in since)
    price, hours = reading.config.publish.price_per_gpu_hour, sums["gpu_hours"]
    money = None if price is None or hours is None else price * hours
    return {
        **NO_COST,
        **sums,
        **{"money": money, "currency": "" if money is None else reading.config.publish.currency},
        **{"lost_seconds": lost_seconds, "lost_steps": lost_steps, "judge": _judge_use(reading)},
    }


def _share(row: StageRow, began_at: str) -> float:
    """Share of a stage's work that was done after the start of the run."""
    seconds = sum(a["seconds"] or 0.0 for a in row.attempts)
    since = sum(a["seconds"] or 0.0 for a in row.attempts if a["began_at"] >= began_at)
    return since / seconds if seconds else 1.0


def _judge_use(reading: RunReading) -> dict[str, float]:
    """Judge counters over the finished stages of this run; empty if there are none."""
    sums: Counter[str] = Counter()
    for name in reading.own():
        report = result.report if (result := reading.result(name)) is not None else {}
        told = report.get("judge") or report.get("judge_usage") or {}
        sums.update({k: told[k] for k in _OF_JUDGE if k in told})
    return dict(sums)


# ---------------------------------------------------------------- the disk


def disk_of_run(reading: RunReading) -> Row:
    """Files in the folders of the run's stages by kind, and free space."""
    used = reading.tried("The disk use of the run", _used, reading) or {}
    events = (e for e in reading.events if e.get("event") == "reclaimed")
    reclaimed = sum(int(e.get("bytes") or 0) for e in events)
    space = reading.tried(
        "The free disk space",
        lambda: DiskManager(reading.workspace, reading.config.disk).available(),
    )
    left = {} if space is None else picked(space, "free_bytes", "limit_bytes", "source")
    return {**NO_DISK, "used": used, **left, "reclaimed_bytes": reclaimed}


def _used(reading: RunReading) -> dict[str, int]:
    """Bytes by kind of file, over all stages of the run and its local publications."""
    stages = [i for i in reading.run.stages.values() if not is_service(i)]
    sums: Counter[str] = Counter()
    for item in inventory_of(reading.workspace.layout, stages):
        sums[item.kind] += item.size.bytes
    targets = {
        str(result.report["target"])
        for name in reading.histories
        if (result := reading.result(name)) is not None and result.report.get("target")
    }
    here = [Path(t) for t in targets if Path(t).is_absolute() and Path(t).is_dir()]
    sums["published"] += sum(size_of(p).bytes for p in here)
    return {kind: sums[kind] for kind in KINDS if sums[kind]}


def report_of_run(
    run: str | None = None, workspace: str | Path = RecipeConfig.workspace
) -> RunReport:
    """The complete report of a run: stages, curves, metrics, examples, cost. Writes nothing.

    Parameters
    ----------
    run
        Its id, or an unambiguous part of it (default: the newest of the workspace).
    workspace
        The folder that has its records.

    Returns
    -------
    RunReport
        Unreadable records are among its ``warnings``.

    Raises
    ------
    ConfigurationError
        There is no such run; the message names the nearest.
    """
    reading = _reading(run, workspace)
    return _report(reading, evaluations_of_run(reading))


def _reading(run: str | None, workspace: str | Path) -> RunReading:
    ws = Workspace.read_only(workspace)
    return RunReading(ws, required_run(ws, run, "a run to report on"))


def _report(reading: RunReading, evaluations: Sequence[ModelEvaluation]) -> RunReport:
    status = look(reading)
    rows = stage_rows(reading, status)
    state, state_text = standing_of(status, rows)
    config = reading.run.config
    note, tags = label_of(reading.workspace, reading.run.run, config.get("tracking") or {})
    people = reading.tried("People's labels", reading.workspace.people_of, reading.run.run) or ()
    published, words = publications(reading), reading.run.command
    provenance = {  # machine and versions; the command is separate
        str(k): _shown(v)
        for k, v in reading.run.provenance.items()
        if k != "command" and v not in (None, "", {}, [])
    }
    return RunReport(
        version=RUN_REPORT_VERSION,
        run=reading.run.run,
        recipe=reading.run.recipe,
        description=reading.config.description,
        state=state,
        state_text=masked(state_text),
        command=(*(Path(w).name for w in words[:1]), *masked_overrides(words[1:])),
        workspace=str(reading.workspace.root),
        began_at=reading.run.started_at,
        ended_at="" if state == "running" else last_event(reading, rows),
        made_at=now_text(),
        note=masked(note),
        tags=tags,
        agent=bool(reading.config.environment.name),
        stages=rows,
        incidents=incident_lines(reading),
        curves=training_curves(reading),
        numbers=reading.tried("Numbers of evaluations", number_rows, evaluations, people) or (),
        changes=change_rows(reading, evaluations),
        examples=(*evaluation_examples(reading, evaluations), *rollout_examples(reading)),
        disk=disk_of_run(reading),
        cost=cost_of_run(reading, rows),
        published=published,
        overrides=masked_overrides(reading.run.overrides),
        settings=changed_settings(reading.run.config),
        provenance={"code": reading.run.code, **provenance},
        next_commands=next_commands(reading, state, rows, published),
        warnings=_warnings(reading),  # last: the others may add some
    )


def _warnings(reading: RunReading) -> tuple[str, ...]:
    holes = reading.tried("Attacks on the reward", attack_notes, reading.config) or []
    found = [*holes, *reading.warnings, *monitor_words(reading)]
    return tuple(dict.fromkeys(map(masked, found)))


def report_run(
    run: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    folder: str | Path | None = None,
    reload_s: int = RELOAD_S,
    samples: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> WrittenReport[RunReport]:
    """Write the report of a run as page, Markdown and JSON, and the page of all its samples.

    Parameters
    ----------
    run
        Run id (default: the newest).
    workspace
        The folder that has its records.
    folder
        Folder for the files (default: ``reports/RUN`` in the workspace).
    reload_s
        Interval at which the page of a running run reloads itself, seconds.
    samples
        Write the page of all samples; without it, the report links to one that its reader makes.
    progress
        Called with the number of files of samples read, and of all.

    Returns
    -------
    WrittenReport
        The report, and the path of its ``page``.

    Raises
    ------
    ConfigurationError
        There is no such run; the message names the nearest.
    NoSpaceError
        There is no space for the files; earlier files are kept.
    """
    # Templates are imported only for writing.
    from refiner_core.report.pages import json_text
    from refiner_core.report.run.rendering import markdown, page

    reading = _reading(run, workspace)
    evaluations = evaluations_of_run(reading)
    reports = reading.workspace.layout.reports
    place = reports / reading.run.run if folder is None else Path(folder)
    linked: bool | None = None
    if samples:
        what = "Samples for their page"
        made = reading.tried(what, write_samples_page, reading, evaluations, place, progress)
        linked = bool(made)
    report = _report(reading, evaluations)
    written = WrittenReport(report, place)
    files = {
        VALUES: json_text(report),
        TEXT: markdown(report),
        PAGE: page(
            report,
            reload_s=reload_s,
            samples=bool(report.examples) if linked is None else linked,
        ),
    }
    write_files(written.folder, files)
    return written
