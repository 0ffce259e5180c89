"""What a run was made of and what it left: settings, provenance, publications, next commands.

In: a :class:`~flows.reporting.run.reading.RunReading`. Out: plain values. A report may be shown to
others: logins in addresses, and settings that are there to carry secrets, are left out.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.reporting.run.reading import RunReading
from infra.host.secrets import HIDDEN, carries_secrets, masked, shown_override, without_secrets
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.marks import walk
from refiner_core.report.run.document import Published, RunReport, StageRow

#: What the head of a report says already.
_IN_THE_HEAD = ("recipe", "description", "workspace")


def shown_overrides(overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides as they were said, without secrets."""
    return tuple(map(shown_override, overrides))


def changed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recorded recipe that are not their defaults, by dotted name."""
    found: dict[str, Any] = {}
    for path, info in walk(RecipeConfig):
        value = _at(config, path, info.default)
        if path in _IN_THE_HEAD or value == _plain(info.default):
            continue
        found[path] = HIDDEN if carries_secrets(path) else _shown(value)
    return found


def _at(config: Mapping[str, Any], path: str, default: Any) -> Any:
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _plain(default)
        value = value[part]
    return _plain(value)


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _shown(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_shown(v) for v in value]
    return without_secrets(value) if isinstance(value, str) else value


def provenance_of(reading: RunReading) -> dict[str, Any]:
    """Code, machine and versions that the call recorded."""
    told = dict(reading.run.provenance)
    told.pop("command", None)  # the report has it
    found = {str(k): _shown(_plain(v)) for k, v in told.items() if v not in (None, "", {}, [])}
    return {"code": reading.run.code, **found}


def without_credentials(report: RunReport) -> RunReport:
    """What stages, servers and libraries have said, masked; answers of models stay as they are."""
    return replace(
        report,
        state_text=masked(report.state_text),
        stages=tuple(_stage_without(row) for row in report.stages),
        incidents=tuple(replace(i, text=masked(i.text)) for i in report.incidents),
        warnings=tuple(map(masked, report.warnings)),
    )


def _stage_without(row: StageRow) -> StageRow:
    attempts = tuple(replace(a, text=masked(a.text)) if a.text else a for a in row.attempts)
    return replace(row, reason=masked(row.reason), attempts=attempts)


# ---------------------------------------------------------------- what it left


def publications(reading: RunReading) -> tuple[Published, ...]:
    """What is published where, as the stages that did it have recorded."""
    found = []
    for name, history in reading.of_kind("publish"):
        result = history.record.result
        if result is None or not result.report.get("target"):
            continue
        step = result.report.get("step")
        found.append(
            Published(
                stage=name,
                target=without_secrets(str(result.report["target"])),
                card=_card(reading, name),
                step=None if step is None else int(step),
            )
        )
    return tuple(sorted(found, key=lambda p: (p.step is None, p.step or 0)))


def _card(reading: RunReading, publish: str) -> str:
    """The model card: as the card stage has finished it, else as it was published first."""
    for name in (publish.replace("publish", "card", 1), publish):
        result = reading.result(name)
        if result is None:
            continue
        folder = reading.workspace.layout.stage(reading.run.stages[name]).data / result.output_dir
        if (path := folder / "README.md").is_file():
            return str(path)
    return ""


def next_commands(
    reading: RunReading, state: str, rows: Sequence[StageRow], published: Sequence[Published]
) -> tuple[str, ...]:
    """What makes sense now, most useful first."""
    where = [f"workspace={reading.workspace.root}"]
    run = reading.run.run
    commands: list[list[str]] = []
    if state == "running":
        commands.append(["refiner", "status", run, "--watch", *where])
        commands.append(["refiner", "report", run, "--watch", *where])
    for row in rows:
        if row.state == "failed":
            commands.append(["refiner", "logs", row.name, *where])
    if state in ("failed", "stopped"):
        commands.append(["refiner", "resume", run, *where])
        commands.append(["refiner", "status", run, "--incidents", *where])
    if state == "done":
        commands += [["refiner", "card", "check", p.target] for p in published[-1:]]
        commands.append(["refiner", "disk", *where])
    return tuple(shlex.join(command) for command in commands)


def command_of(reading: RunReading) -> tuple[str, ...]:
    """The command line of the call, as one would type it."""
    words = reading.run.command
    first = (Path(words[0]).name,) if words else ()
    return (*first, *shown_overrides(words[1:]))
