"""One night: every checkpoint under every protocol, then the state of the history.

In: a nightly evaluation and a night (default: the newest that has begun). Out: a
:class:`NightOutcome`, as lines and as JSON. Repeated and concurrent calls are safe: one process
works on a night, lines of the history are written once, and finished work is not repeated. An
unfinished night continues; one that has passed is not evaluated any more, since the judge and the
machines of that time are gone. The canary's run comes first, so it has the first slot. Ctrl-C asks
all runs to save and stop. The trend page is the self-contained file
``WORKSPACE/nightly/NAME/page.html``.

Relative paths in a nightly file are relative to its folder (for a shipped one, to the current
folder), wherever the process was started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flows.nightly.checkpoints import (
    CheckpointNotReady,
    ResolvedWeights,
    is_done,
    night_overrides,
    night_plan,
    resolve,
)
from flows.nightly.history import deliver, harvest, raise_alerts, read_history, status_json
from flows.running.calls import pin_code, record_run
from flows.running.console import Console
from flows.running.foreground import orchestrate
from infra.jobs.dispatch import make_router
from infra.orchestrator.members import Member, MemberSource
from infra.store import atomic
from infra.store.nightly_records import NightlyRecords
from infra.store.orchestrators import orchestrator_of
from infra.store.records import now_text
from infra.store.workspace import Workspace
from refiner_core.contract.errors import (
    ConfigurationError,
    HubOutage,
    HubRefused,
    RefinerError,
    no_such,
)
from refiner_core.contract.files import find_file, readable, shipped_files
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord, picked, to_json
from refiner_core.contract.types import StageView
from refiner_core.evaluation.metrics import has_metric, metrics_of
from refiner_core.nightly.definition import Nightly, Schedule, parse_nightly
from refiner_core.nightly.page import HistoryView, trend_page

Tell = Callable[[str], None]
NightState = Literal["done", "incomplete", "busy", "missed"]


@dataclass(frozen=True)
class _NightContext:
    """Context of a night."""

    nightly: Nightly
    workspace: Workspace
    records: NightlyRecords
    tell: Tell


@dataclass(frozen=True)
class _Entry:
    """State of a checkpoint in a night.

    ``state``: ``measured`` now, ``kept`` (earlier values are still valid), ``missing`` (for good;
    ``why`` has the reason), ``failed`` (the same command tries again).
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
        ``incomplete``: the same command continues; ``busy``: another process works on it;
        ``missed``: it has passed.
    late
        True if a later night had begun before.
    alerts, undelivered
        New alerts; and those that a channel did not accept, with reasons.
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
        """0, or the exit code of the first failed checkpoint."""
        return next((e.exit_code or 1 for e in self.entries if e.state == "failed"), 0)


class CheckedNightly(NamedTuple):
    """A valid nightly evaluation: its next night, and warnings."""

    nightly: Nightly
    following: datetime
    warnings: list[str]


class NightlyHistory(NamedTuple):
    """All nights of a nightly evaluation, and its records."""

    reading: HistoryView
    records: NightlyRecords


def shipped_nightlies() -> dict[str, Path]:
    """Names and files of the shipped nightly evaluations."""
    return shipped_files("flows.nightly")


def load_nightly(file: str, overrides: Sequence[str] = ()) -> Nightly:
    """The nightly evaluation with a shipped name, or in a YAML file.

    Parameters
    ----------
    overrides
        Overrides of the recipe for this call, applied after the file's. ``workspace=DIR`` is
        relative to the current folder.

    Raises
    ------
    ConfigurationError
        There is no such file, or it is invalid.
    """
    shipped = shipped_nightlies()
    path = find_file(file, "nightly evaluation", shipped).absolute()
    folder = Path.cwd() if file in shipped else path.parent
    with readable(f"The nightly file {path}"):
        text = path.read_text(encoding="utf-8")
    nightly = parse_nightly(text, stem=path.stem, origin=str(path), folder=str(folder))
    return replace(nightly, overrides=(*nightly.overrides, *map(_whole, overrides)))


def _whole(override: str) -> str:
    """The override with an absolute workspace."""
    key, sep, value = override.partition("=")
    if sep and key.strip() == "workspace":
        return f"workspace={Path(value).expanduser().absolute()}"
    return override


def workspace_of(nightly: Nightly) -> Path:
    """The workspace of its recipe and overrides."""
    with contextlib.chdir(nightly.folder):
        config = load_recipe(nightly.recipe, nightly.overrides)
        return Path(config.workspace).expanduser().absolute()


def due_night(nightly: Nightly, now: datetime) -> str:
    """The newest night if it is not done and an earlier one was evaluated; else empty."""
    workspace = Workspace.read_only(workspace_of(nightly))
    records = NightlyRecords(workspace, nightly.name)
    night = Schedule(nightly.schedule, nightly.timezone).night_at(now)
    return night if records.nights() and records.ended(night) is None else ""


def check_nightly(file: str, overrides: Sequence[str] = ()) -> CheckedNightly:
    """Check whether a nightly evaluation can be carried out. Changes nothing.

    Parameters
    ----------
    file
        A YAML file or a shipped name.
    overrides
        ``key=value``.

    Returns
    -------
    CheckedNightly
        The content of the file, its next night, warnings.

    Raises
    ------
    RefinerError
        It cannot: the file, the recipe, the canary, or a checkpoint that can never exist.
    """
    nightly = load_nightly(file, overrides)
    warnings: list[str] = []
    with contextlib.chdir(nightly.folder):
        base = load_recipe(nightly.recipe, nightly.overrides)
        workspace = Workspace.read_only(Path(base.workspace).expanduser().absolute())
        canary = _pinned_canary(nightly, workspace)
        plan = night_plan(nightly, canary, "2026-01-01")
        if alien := next((m for m in nightly.alerts.metrics if not has_metric(base, m)), None):
            said = "`alerts.metrics` names a metric that no evaluation has:"
            raise no_such(said, alien, metrics_of(base), "correct `alerts.metrics`")
        for checkpoint in nightly.checkpoints:
            try:
                resolve(checkpoint, workspace)
            except (CheckpointNotReady, HubOutage) as error:
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
    """Work on a night once: finished work is kept, unfinished work continues.

    Parameters
    ----------
    file, overrides
        As of :func:`flows.api.check_nightly`.
    night
        A date of the schedule (default: the newest night that has begun).
    take_over
        Take over from a process on another host that claims the night.
    tell
        Receives progress messages.

    Returns
    -------
    NightOutcome
        Evaluated and missed checkpoints, alerts.

    Raises
    ------
    ConfigurationError
        The canary has changed, there is no such night, or the recipe is invalid.
    """
    return run_night(load_nightly(file, overrides), night, take_over=take_over, tell=tell)


def nightly_history(file: str, overrides: Sequence[str] = ()) -> NightlyHistory:
    """Read all nights so far.

    Parameters
    ----------
    file
        A YAML file, or a shipped name.
    overrides
        ``key=value``, such as ``workspace=DIR``.

    Returns
    -------
    NightlyHistory
        Metrics of all nights, and the detected changes.

    Raises
    ------
    ConfigurationError
        There is no such nightly evaluation; the message names the places searched.
    """
    nightly = load_nightly(file, overrides)
    workspace = Workspace.read_only(workspace_of(nightly))
    return NightlyHistory(read_history(nightly, workspace), NightlyRecords(workspace, nightly.name))


def nightly_status(file: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Status of a nightly evaluation: tonight, last metrics, open alerts.

    Parameters
    ----------
    file, overrides
        As of :func:`flows.api.nightly_history`.

    Returns
    -------
    dict
        The content of ``refiner nightly status --json``.

    Raises
    ------
    ConfigurationError
        There is no such nightly evaluation; the message names the places searched.
    """
    reading, records = nightly_history(file, overrides)
    return status_json(reading, records, datetime.now(UTC))


def nightly_page(
    file: str, overrides: Sequence[str] = (), *, out: str | Path | None = None
) -> Path:
    """Write the trend page: one HTML file that needs only a browser.

    Parameters
    ----------
    file, overrides
        As of :func:`flows.api.nightly_history`.
    out
        Output file (default: in the workspace).

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
    """Work on a night, and report changes.

    Parameters
    ----------
    night
        A date of the schedule (default: the newest night that has begun by ``now``).
    now
        The time (default: the system's).
    take_over
        Take over from a process on another host that claims the night.

    Raises
    ------
    ConfigurationError
        The canary has changed, there is no such night, or the recipe is invalid; nothing was
        evaluated.
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
        with _night_held(records, wanted, take_over) as refusal:
            if refusal:
                return NightOutcome(nightly.name, wanted, "busy", late, message=refusal)
            entries: tuple[_Entry, ...] = ()
            if records.ended(wanted) is None:
                entries = _tonight(_NightContext(nightly, workspace, records, tell), wanted)
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


def _carry_out(
    at: _NightContext, night: str, wanted: Sequence[tuple[ResolvedWeights, Plan]]
) -> dict[str, tuple[str, Mapping[str, StageView]]]:
    """Work on a recorded call for each plan until its end; unfinished calls of this night continue.
    Returns the call and its last views, by checkpoint.

    Raises
    ------
    KeyboardInterrupt
        A second, later Ctrl-C: running jobs continue by themselves.
    """
    pinned, members, workspace = None, list[Member](), at.workspace
    for found, plan in wanted:
        name = found.checkpoint.name
        run = _begun(at, night, name, plan)
        if run is None:
            pinned = pinned or pin_code(workspace)
            words = night_overrides(at.nightly, found, night)
            which = {"name": at.nightly.name, "night": night, "checkpoint": name}
            run = record_run(plan, workspace, at.nightly.recipe, words, pinned, nightly=which)
            workspace.write_run(run)
            at.records.note_run(night, name, run.run, found.digest)
        members.append(Member(plan, run, workspace, name))
    if not members:
        return {}
    for member in members:
        member.take_up()

    def tell(member: Member) -> None:
        bad = "; ".join(f"{v.name} {v.state}: {v.message}" for v in _ended_badly(member.views()))
        at.tell(f"{member.name}: {bad or 'evaluated'}")

    config = members[0].plan.config
    router = make_router(config.dispatch, workspace)
    orchestrate(MemberSource(members, tell), workspace, router, config, console=Console(quiet=True))
    return {member.name: (member.run.run, member.views()) for member in members}


def _begun(at: _NightContext, night: str, checkpoint: str, plan: Plan) -> RunRecord | None:
    wanted = {s.name: s.id for s in plan.stages}
    for noted in reversed(at.records.runs_of(night, checkpoint)):
        run = at.workspace.read_run(noted["run"])
        if dict(run.stages) == wanted and not orchestrator_of(at.workspace, run.run).works:
            return run
    return None


def _ended_badly(views: Mapping[str, StageView]) -> list[StageView]:
    """Stages that have failed, or were stopped."""
    return [v for v in views.values() if v.state in ("failed", "interrupted")]


@contextlib.contextmanager
def _night_held(records: NightlyRecords, night: str, take_over: bool = False) -> Iterator[str]:
    """Claim a night within the block; yields the reason if another process has it."""
    who = records.worker_of(night)
    if who.standing == "running" or (who.works and not take_over):
        hint = "; if you know that it is gone: --take-over" * (who.standing == "elsewhere")
        yield f"The night of {night} is already being worked on by {who.where}{hint}."
        return
    if not records.take_night(night, who.turn):
        yield f"The night of {night} has just been taken up by another process."
        return
    try:
        yield ""
    finally:
        records.leave_night(night, who.turn + 1)


def _tonight(at: _NightContext, night: str) -> tuple[_Entry, ...]:
    """Every checkpoint of the current night."""
    entries: dict[str, _Entry] = {}
    plans: dict[str, tuple[ResolvedWeights, Plan]] = {}
    for checkpoint in at.nightly.everybody:
        try:
            found = resolve(checkpoint, at.workspace)
            plans[checkpoint.name] = (found, night_plan(at.nightly, found, night))
        except CheckpointNotReady as error:
            at.records.miss(night, checkpoint.name, error.what)
            entries[checkpoint.name] = _Entry(checkpoint.name, "missing", error.what)
        except (HubOutage, HubRefused, ConfigurationError) as error:
            if checkpoint == at.nightly.canary:
                raise
            at.tell(f"{checkpoint.name}: {error}")
            code = error.exit_code
            entries[checkpoint.name] = _Entry(checkpoint.name, "failed", str(error), exit_code=code)
    wanted = [pair for pair in plans.values() if not is_done(pair[1], at.workspace)]
    worked = _carry_out(at, night, wanted)
    known = at.records.rows()
    for name, (found, plan) in plans.items():
        run, views = worked.get(name, ("", {}))
        noted = at.records.runs_of(night, name)
        any_run = run or (str(noted[-1]["run"]) if noted else "")  # or another process's
        # The canary's stage is this night's.
        ours = any_run or found.checkpoint == at.nightly.canary
        conditions = night if ours else ""
        about = (at.nightly, at.workspace, plan, found, night, known)
        harvest(*about, measured_in=conditions, run=any_run)
        if is_done(plan, at.workspace):
            entries[name] = _Entry(name, "measured" if run else "kept", run=run)
            continue
        bad = _ended_badly(views)
        why = "; ".join(f"{v.name}: {v.message}" for v in bad) or "it was not evaluated"
        code = next((v.exit_code for v in bad if v.exit_code), 1)
        entries[name] = _Entry(name, "failed", why, run, code)
    return tuple(entries[c.name] for c in at.nightly.everybody)


def _pinned_canary(nightly: Nightly, workspace: Workspace) -> ResolvedWeights:
    """The canary; refuses one that may change or has changed."""
    found, source = resolve(nightly.canary, workspace), nightly.canary.source
    if not source.digest and not source.is_commit:
        raise ConfigurationError(
            f"The canary ({found.what}) is not pinned by its content.",
            expected="the `digest` of its weights",
            fix=f"write `digest: {found.digest}` beside it, if these are the right ones",
        )
    return found


OUTPUT_VERSION = 1


def outcome_json(outcome: NightOutcome) -> dict[str, Any]:
    """A night as JSON."""
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
    """A night as lines for people."""
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
