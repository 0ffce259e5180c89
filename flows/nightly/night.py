"""One night: every checkpoint under every protocol, then what the history says now.

In: a nightly evaluation and a night (default: the newest that has begun). Out: a
:class:`NightOutcome`, as lines and as JSON. It may be called as often as one likes, and by several
at once: one process works on a night, lines of the history are written once, and what is done is
not done again. A night that an earlier process has left unfinished goes on. Its trend page is
``WORKSPACE/nightly/NAME/page.html``, one file that needs nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flows.nightly.checkpoints import NothingYet, Resolved, is_done, night_plan, resolve
from flows.nightly.evaluations import (
    At,
    Tell,
    carry_out,
    ended_badly,
    harvest,
    night_held,
)
from flows.nightly.files import load_nightly, workspace_of
from flows.nightly.history import deliver, raise_alerts, read_history
from infra.store import atomic
from infra.store.nightly_records import NightlyRecords
from infra.store.records import now_text
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError, HubOutage, HubRefused, RefinerError
from refiner_core.contract.fields import suggest
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import picked, to_json
from refiner_core.evaluation.metrics import has_metric, metrics_of
from refiner_core.nightly.definition import Nightly, Schedule
from refiner_core.nightly.page import Reading, open_alerts, trend_page
from refiner_core.report.printing import measured

NightState = Literal["done", "incomplete", "busy", "missed"]


@dataclass(frozen=True)
class _Entry:
    """Standing of a checkpoint in a night.

    ``state``: ``measured`` now, ``kept`` (its numbers still hold), ``missing`` (``why`` says it,
    and that it stays so), ``failed`` (the same command tries again).
    """

    checkpoint: str
    state: Literal["measured", "kept", "missing", "failed"]
    why: str = ""
    run: str = ""
    exit_code: int = 0


@dataclass(frozen=True)
class NightOutcome:
    """Outcome of a night.

    Attributes
    ----------
    state
        ``incomplete``: the same command goes on; ``busy``: another process works on it;
        ``missed``: it has passed.
    late
        Whether a later night had begun before.
    alerts, undelivered
        New ones; and those that some channel did not take, with why.
    """

    nightly: str
    night: str
    state: NightState
    late: bool
    entries: tuple[_Entry, ...] = ()
    alerts: tuple[Mapping[str, Any], ...] = ()
    undelivered: Mapping[str, str] = field(default_factory=dict)
    page: str = ""
    message: str = ""

    @property
    def exit_code(self) -> int:
        """0, or that of the first checkpoint that failed."""
        return next((e.exit_code or 1 for e in self.entries if e.state == "failed"), 0)


class CheckedNightly(NamedTuple):
    """A nightly evaluation that can be carried out: when it is next, and what is worth knowing."""

    nightly: Nightly
    following: datetime
    warnings: list[str]


class NightlyHistory(NamedTuple):
    """All nights of a nightly evaluation, read; and its records."""

    reading: Reading
    records: NightlyRecords


def check_nightly(file: str, overrides: Sequence[str] = ()) -> CheckedNightly:
    """Whether a nightly evaluation can be carried out. Changes nothing.

    Parameters
    ----------
    file
        A YAML file or a shipped name.
    overrides
        ``key=value``.

    Returns
    -------
    CheckedNightly
        What the file says, its next night, warnings.

    Raises
    ------
    RefinerError
        It cannot: the file, the recipe, the canary, or a checkpoint that can never be there.
    """
    nightly = load_nightly(file, overrides)
    warnings: list[str] = []
    with contextlib.chdir(nightly.folder):
        base = load_recipe(nightly.recipe, nightly.overrides)
        workspace = Workspace.read_only(Path(base.workspace).expanduser().absolute())
        canary = _pinned_canary(nightly, workspace)
        plan = night_plan(nightly, canary, "2026-01-01", base)
        if alien := next((m for m in nightly.alerts.metrics if not has_metric(base, m)), None):
            known = metrics_of(base)
            raise ConfigurationError(
                f"`alerts.metrics` names {alien!r}, which no evaluation has."
                f"{suggest(alien, known)}",
                expected="one of: " + ", ".join(known),
                fix="correct `alerts.metrics`",
            )
        for checkpoint in nightly.checkpoints:
            try:
                resolve(checkpoint, workspace)
            except (NothingYet, HubOutage) as error:
                warnings.append(f"{checkpoint.name}: {error.what}")
            except RefinerError as error:
                raise error.of(f"`{checkpoint.name}`") from None
    if plan.config.judge.kind == "lexical":
        warnings.append("The judge is lexical, which cannot drift: the canary watches machines")
    following = Schedule(nightly.schedule, nightly.timezone).next_after(datetime.now(UTC))
    return CheckedNightly(nightly, following, warnings)


def run_nightly(
    file: str,
    overrides: Sequence[str] = (),
    *,
    night: str | None = None,
    take_over: bool = False,
    tell: Tell = lambda text: None,
) -> NightOutcome:
    """Work on a night once: what is done is kept, what was left is gone on with.

    Parameters
    ----------
    file, overrides
        As of :func:`flows.api.check_nightly`.
    night
        A date of the schedule (default: the newest night that has begun).
    take_over
        Also where a process on another host says that it works on the night.
    tell
        Hears what is done.

    Returns
    -------
    NightOutcome
        What was evaluated, missed and told.

    Raises
    ------
    ConfigurationError
        The canary is not what was pinned, there is no such night, or the recipe cannot be meant.
    """
    return run_night(load_nightly(file, overrides), night, take_over=take_over, tell=tell)


def nightly_history(file: str, overrides: Sequence[str] = ()) -> NightlyHistory:
    """All nights so far.

    Parameters
    ----------
    file
        A YAML file, or a shipped name.
    overrides
        ``key=value``, such as ``workspace=DIR``.

    Returns
    -------
    NightlyHistory
        Numbers of all nights, and what was seen in them.

    Raises
    ------
    ConfigurationError
        There is none; says where it was looked for.
    """
    nightly = load_nightly(file, overrides)
    workspace = Workspace.read_only(workspace_of(nightly))
    return NightlyHistory(read_history(nightly, workspace), NightlyRecords(workspace, nightly.name))


def nightly_status(file: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """How a nightly evaluation stands: tonight, last numbers, alerts that have not recovered.

    Parameters
    ----------
    file, overrides
        As of :func:`flows.api.nightly_history`.

    Returns
    -------
    dict
        What ``refiner nightly status --json`` prints.

    Raises
    ------
    ConfigurationError
        There is none; says where it was looked for.
    """
    reading, records = nightly_history(file, overrides)
    return status_json(reading, records, datetime.now(UTC))


def nightly_page(
    file: str, overrides: Sequence[str] = (), *, out: str | Path | None = None
) -> Path:
    """Write the trend page: one HTML file that needs nothing but a browser.

    Parameters
    ----------
    file, overrides
        As of :func:`flows.api.nightly_history`.
    out
        Where to (default: into the workspace).

    Returns
    -------
    Path
        The page.

    Raises
    ------
    ConfigurationError
        There is no such nightly evaluation.
    OSError
        The page cannot be written there.
    """
    reading, records = nightly_history(file, overrides)
    if out is None:
        return records.write_page(trend_page(reading, now_text()))
    path = Path(out).expanduser().absolute()
    atomic.write_text(path, trend_page(reading, now_text()))
    return path


def run_night(
    nightly: Nightly,
    night: str | None = None,
    *,
    now: datetime | None = None,
    take_over: bool = False,
    tell: Tell = lambda _: None,
) -> NightOutcome:
    """Work on a night, and tell what has changed.

    Parameters
    ----------
    night
        A date of the schedule; the newest night that has begun by ``now``, without.
    now
        The time; that of the system, without.
    take_over
        Also where a process on another host says that it works on the night.

    Raises
    ------
    ConfigurationError
        The canary is not what was pinned, there is no such night, or the recipe cannot be meant;
        nothing was evaluated.
    """
    now = now or datetime.now(UTC)
    schedule = Schedule(nightly.schedule, nightly.timezone)
    current = schedule.night_at(now)
    wanted = night or current
    if schedule.begins(wanted) > now:
        raise ConfigurationError(
            f"The night of {wanted} has not begun.",
            expected=f"{current}, or an earlier one",
            fix="wait, or drop --night",
        )
    late = wanted != current
    with contextlib.chdir(nightly.folder):
        base = load_recipe(nightly.recipe, nightly.overrides)
        workspace = Workspace.open(Path(base.workspace).absolute(), base.data_root)
        records = NightlyRecords(workspace, nightly.name)
        _pinned_canary(nightly, workspace)
        if late and records.ended(wanted) is None:
            passed = f"The night of {wanted} has passed, and was not done; {current} is the newest."
            return NightOutcome(nightly.name, wanted, "missed", late, message=passed)
        records.note_version(picked(nightly, "name", "text", "origin", "folder", "overrides"))
        with night_held(records, wanted, take_over) as refusal:
            if refusal:
                return NightOutcome(nightly.name, wanted, "busy", late, message=refusal)
            entries: tuple[_Entry, ...] = ()
            if records.ended(wanted) is None:
                entries = _tonight(At(nightly, workspace, records, base, tell), wanted)
                if all(e.state != "failed" for e in entries):
                    states = {e.checkpoint: e.state for e in entries}
                    records.end_night(wanted, {"entries": states})
            reading = read_history(nightly, workspace)
            alerts = raise_alerts(reading, records)
            undelivered = deliver(nightly, alerts, records)
            if alerts:
                reading = read_history(nightly, workspace)
            return NightOutcome(
                nightly=nightly.name,
                night=wanted,
                state="done" if records.ended(wanted) else "incomplete",
                late=late,
                entries=entries,
                alerts=tuple(alerts),
                undelivered=undelivered,
                page=str(records.write_page(trend_page(reading, now_text()))),
            )


def _tonight(at: At, night: str) -> tuple[_Entry, ...]:
    """Every checkpoint of the night that is now."""
    entries: dict[str, _Entry] = {}
    plans: dict[str, tuple[Resolved, Plan]] = {}
    for checkpoint in at.nightly.everybody:
        try:
            found = resolve(checkpoint, at.workspace)
            plans[checkpoint.name] = (found, night_plan(at.nightly, found, night, at.base))
        except NothingYet as error:
            at.records.miss(night, checkpoint.name, error.what)
            entries[checkpoint.name] = _Entry(checkpoint.name, "missing", error.what)
        except (HubOutage, HubRefused, ConfigurationError) as error:
            if checkpoint == at.nightly.canary:
                raise
            at.tell(f"{checkpoint.name}: {error}")
            code = error.exit_code
            entries[checkpoint.name] = _Entry(checkpoint.name, "failed", str(error), exit_code=code)
    wanted = [pair for pair in plans.values() if not is_done(pair[1], at.workspace)]
    worked = carry_out(at, night, wanted)
    known = at.records.rows()
    for name, (found, plan) in plans.items():
        run, views = worked.get(name, ("", {}))
        noted = at.records.runs_of(night, name)
        any_run = run or (str(noted[-1]["run"]) if noted else "")  # or another process's
        # The canary's stage is this night's.
        ours = any_run or found.checkpoint == at.nightly.canary
        harvest(at, plan, found, night, known, measured_in=night if ours else "", run=any_run)
        if is_done(plan, at.workspace):
            entries[name] = _Entry(name, "measured" if run else "kept", run=run)
            continue
        bad = ended_badly(views)
        why = "; ".join(f"{v.name}: {v.message}" for v in bad) or "it was not evaluated"
        code = next((v.exit_code for v in bad if v.exit_code), 1)
        entries[name] = _Entry(name, "failed", why, run, code)
    return tuple(entries[c.name] for c in at.nightly.everybody)


def _pinned_canary(nightly: Nightly, workspace: Workspace) -> Resolved:
    """The canary; refuses one that may change, or is not what it was."""
    found, source = resolve(nightly.canary, workspace), nightly.canary.source
    if not source.digest and not source.is_commit:
        raise ConfigurationError(
            f"The canary ({found.what}) is not pinned by its content.",
            expected="the `digest` of its weights",
            fix=f"write `digest: {found.digest}` beside it, if these are the right ones",
        )
    return found


OUTPUT_VERSION = 1
_LAST = 7


def outcome_json(outcome: NightOutcome) -> dict[str, Any]:
    """A night for scripts."""
    value = to_json(outcome)
    del value["entries"]
    return {
        "version": OUTPUT_VERSION,
        **value,
        "looked_after": {},  # earlier versions completed nights that had passed
        "checkpoints": [picked(e, "checkpoint", "state", "why", "run") for e in outcome.entries],
        "exit_code": outcome.exit_code,
    }


def outcome_lines(outcome: NightOutcome) -> Iterator[str]:
    """A night for people."""
    late = ", late" if outcome.late else ""
    yield f"{outcome.nightly}, night of {outcome.night}{late}: {outcome.state}"
    if outcome.message:
        yield f"  {outcome.message}"
    for entry in outcome.entries:
        why = f": {entry.why}" if entry.why else ""
        run = f" ({entry.run})" if entry.run else ""
        yield f"  {entry.checkpoint}: {entry.state}{run}{why}"
    for alert in outcome.alerts:
        yield f"  alert: {alert['title']}"
        yield f"    {alert['text']}"
    for what, why in outcome.undelivered.items():
        yield f"  not delivered: {what}: {why}"
    if outcome.page:
        yield f"  page: {outcome.page}"


def status_json(reading: Reading, records: NightlyRecords, now: datetime) -> dict[str, Any]:
    """Standing of a nightly evaluation, for scripts."""
    nightly = reading.nightly
    schedule = Schedule(nightly.schedule, nightly.timezone)
    current = schedule.night_at(now)
    return {
        **{"version": OUTPUT_VERSION, "nightly": nightly.name, "night": current},
        **picked(nightly, "schedule", "timezone"),
        "state": night_state(records, current),
        "next": schedule.next_after(now).isoformat(),
        "nights": {n: night_state(records, n) for n in reading.nights[-_LAST:]},
        "series": [_series_json(s) for s in reading.series],
        "open_alerts": [dict(a) for a in open_alerts(reading.alerts)],
        "undelivered": {
            a["id"]: whys for a in reading.alerts if (whys := records.not_told(a["id"]))
        },
    }


def night_state(records: NightlyRecords, night: str) -> str:
    """``done``, ``running``, ``incomplete`` (begun, and nobody works on it) or ``not begun``."""
    if records.ended(night) is not None:
        return "done"
    who = records.worker_of(night)
    if who.standing == "none":
        return "not begun"
    return "running" if who.works else "incomplete"


def _series_json(series: Any) -> dict[str, Any]:
    key, last = series.key, series.rows[-1]
    return {
        **picked(key, "checkpoint", "metric", "decoding", "protocol"),
        **picked(series, "canary", "protocol_name"),
        **picked(last, "protocol_set", "night", "source"),
        "nights": len(series.rows),
        **{k: last.numbers[key.metric].get(k) for k in ("value", "low", "high", "n")},
    }


def status_rows(status: dict[str, Any]) -> list[list[str]]:
    """A table: checkpoint, metric, protocol file, value with interval, night, weights."""
    return [
        [
            s["checkpoint"] + (" (canary)" if s["canary"] else ""),
            f"{s['metric']} ({s['decoding']})",
            s["protocol_set"] or "(the recipe's)",
            measured(s),
            s["night"],
            str(s["nights"]),
            s["source"],
        ]
        for s in status["series"]
    ]
