"""Progress on standard error, and suggested next commands at the end.

In: an orchestrator's views, repeatedly; for a sweep also the states of its trials. Out: on a
terminal a table that is redrawn (rich, imported only then), for a sweep with the running stages
only; elsewhere plain lines. For a run, one line per change of a stage's state, and a progress line
at most every ten seconds; for a sweep, one line per change of a trial's state, and sometimes the
running stages. ``quiet`` leaves only warnings and failures. Standard output is reserved for
``--json``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from infra.host.terminal import printable, raw
from infra.orchestrator.timeline import first_line, rough
from refiner_core.contract.types import Progress, StageView
from refiner_core.report.printing import clock, table_lines

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text


def can_redraw(stream: TextIO) -> bool:
    """True if the stream is a terminal on which lines can be redrawn."""
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
    return stream.isatty() and os.environ.get("TERM") != "dumb" and encoding.startswith("utf")


_LINE_EVERY_S = 10.0
#: For a sweep: interval of plain lines with the running stages; the most that a terminal shows.
_AT_WORK_EVERY_S = 30.0
_ROWS = 16
_WORKING = ("running", "reattached")
_NOT_YET = ("queued", "paused", "waiting")
_STATES = ("done", "skipped", "failed", "interrupted", "blocked", *_WORKING, *_NOT_YET)
#: States of trials, in the order of the counts.
TRIAL_STATES = ("done", "running", "waiting", "held", "interrupted", "failed")


class Console:
    """Shows an orchestrator's work on a stream. Closing the terminal, or the reader of a pipe, does
    not stop the work. Safe to call from several threads.

    ``command`` is the command line that runs the same call again, ``workspace`` its folder, ``run``
    the id of its record: the summary proposes commands with them. ``trials`` returns the trials of
    a sweep (``state``, ``reason``, ``run``); ``clock`` is in seconds, monotonic.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        workspace: str = "",
        run: str = "",
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        trials: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._quiet = quiet
        self._stream = sys.stderr if stream is None else stream
        self._clock, self._began = clock, clock()
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._lost = False
        self._fancy = not quiet and can_redraw(self._stream)
        self._trials, self._at_work_said = trials, clock()
        self._trial_states = dict.fromkeys(trials(), "waiting") if trials else {}
        self._command, self._workspace, self._run = tuple(command), workspace, run
        self._states: dict[str, str] = {}
        self._since: dict[str, float] = {}
        self._said: dict[str, tuple[float, Progress]] = {}

    def note(self, message: str) -> None:
        """Print a message, except when quiet."""
        if not self._quiet:
            self._print(message)

    def warn(self, message: str) -> None:
        """Print a warning; the work continues."""
        self._print(f"warning: {message}")

    def close(self) -> None:
        """Restore the terminal. May be called twice."""
        with self._lock:
            live, self._live = self._live, None
            if live is not None:
                with self._while_it_can_be_written():
                    live.stop()

    def _print(self, message: str) -> None:
        with self._lock, self._while_it_can_be_written():
            if self._lost:
                return
            if self._stream.isatty():
                message = printable(message)
            if self._live is not None:
                self._live.console.print(message, markup=False, highlight=False)
            else:
                print(message, file=self._stream, flush=True)

    @contextlib.contextmanager
    def _while_it_can_be_written(self) -> Iterator[None]:
        """Ignore a closed terminal or pipe: the work continues without it."""
        try:
            yield
        except (OSError, ValueError):
            self._lost, self._live = True, None

    def show(self, views: Mapping[str, StageView]) -> None:
        """Update the display."""
        with self._lock:
            now, rows, title = self._clock(), list(views.values()), ""
            for view in rows:
                self._note_change(view, now)
            if self._trials is not None:
                trials, rows = self._trials(), _at_work(rows)
                self._note_trials(trials, rows, now)
                title = trials_text(trials)
            if self._fancy and not self._lost:
                with self._while_it_can_be_written():
                    self._redraw(rows, title)
            self._states.update({name: view.state for name, view in views.items()})

    def finish(self, views: Mapping[str, StageView]) -> None:
        """Show the last state of every stage, then the summary."""
        self._at_work_said = self._clock()  # the last line includes them
        self.show(views)
        self.close()
        if self._trials is not None:
            trials = self._trials()
            if not self._quiet or any(t.state != "done" for t in trials.values()):
                self._print(f"{trials_text(trials)} in {rough(self._clock() - self._began)}")
            return
        if any(map(_is_reported, views.values())) or not self._quiet:
            elapsed = self._clock() - self._began
            self._print("\n".join(self.summary(views, elapsed)))

    def summary(self, views: Mapping[str, StageView], elapsed_s: float) -> list[str]:
        """Lines: what was done, skipped, failed, with paths of logs."""
        counts = states_counted((view.state for view in views.values()), _STATES)
        lines = [f"{states_text(counts) or 'nothing to do'} in {clock(elapsed_s)}"]
        for view in views.values():
            if _is_reported(view):
                lines.append(f"  {view.name}: {view.state}{_colon(view.message)}")
                if view.log and view.state not in ("done", "skipped"):
                    lines.append(f"    log: {view.log}")
        return lines

    def next_commands(self, views: Mapping[str, StageView]) -> list[str]:
        """Useful next commands, most useful first; none if all went well and no summary is
        wanted."""
        where = [f"workspace={self._workspace}"] if self._workspace else []
        troubled = any(v.state not in ("done", "skipped") for v in views.values())
        if self._quiet and not troubled:
            return []
        commands = [
            ["refiner", "logs", v.name, *where] for v in views.values() if v.state == "failed"
        ]
        if troubled and self._command:
            commands.append(list(self._command))
        if self._run:
            commands.append(["refiner", "report", self._run, *where])
        commands.append(["refiner", "status", *where])
        return [shlex.join(command) for command in commands]

    # ------------------------------------------------------------ plain lines

    def _note_change(self, view: StageView, now: float) -> None:
        if view.state != self._states.get(view.name, "waiting"):
            self._since[view.name] = now
            if self._trials is None and (not self._quiet or view.state == "failed"):
                self._print_plain(view, now)
            return
        said_at, said = self._said.get(view.name, (self._since.get(view.name, now), None))
        told = self._trials is None and not self._quiet and now - said_at >= _LINE_EVERY_S
        if told and view.state in _WORKING and view.progress not in (None, said):
            self._print_plain(view, now)

    def _print_plain(self, view: StageView, now: float) -> None:
        if view.progress is not None:
            self._said[view.name] = (now, view.progress)
        if not self._fancy:
            self._print(state_line(view))

    def _note_trials(
        self, trials: Mapping[str, Any], rows: Sequence[StageView], now: float
    ) -> None:
        for name, trial in trials.items():
            if self._trial_states.get(name, "waiting") == trial.state:
                continue
            self._trial_states[name] = trial.state
            # The reason for holding the others is printed once, for all of them.
            if trial.state == "failed" or (not self._quiet and trial.state != "held"):
                run = f" (run {trial.run})" if trial.state == "running" else ""
                why = _colon(first_line(trial.reason, 300))
                self._print(f"{name}: {trial.state}{run}{why}")
        if not self._fancy and not self._quiet and now - self._at_work_said >= _AT_WORK_EVERY_S:
            self._at_work_said = now
            self._print(trials_text(trials))
            for view in rows:
                self._print(f"  {view.name}: {' '.join(filter(None, [view.state, detail(view)]))}")

    # ------------------------------------------------------------ terminal

    def _redraw(self, rows: Sequence[StageView], title: str) -> None:
        if self._live is None:
            from rich.console import Console as RichConsole
            from rich.live import Live

            self._live = Live(
                console=RichConsole(file=raw(self._stream), stderr=True),
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                transient=self._trials is not None,
            )
            self._live.start()
        shown = [title] * bool(title) + self._table(rows[: _ROWS if title else None])
        shown += [f"and {len(rows) - _ROWS} more"] * (bool(title) and len(rows) > _ROWS)
        self._live.update(drawn(shown), refresh=True)

    def _table(self, rows: Sequence[StageView]) -> list[str]:
        now, cells = self._clock(), []
        for view in rows:
            seconds = view.seconds
            if view.state in _WORKING:
                seconds = max(seconds, now - self._since.get(view.name, now))
            took = clock(seconds) if seconds else ""
            cells.append((view.name, view.state, took, detail(view)))
        return [*table_lines(cells, ("stage", "state", "time", "progress"))] if cells else []


def drawn(lines: Sequence[str]) -> Text:
    """Lines for a redrawn terminal, each cut to its width."""
    from rich.text import Text

    return Text(printable("\n".join(lines)), no_wrap=True, overflow="ellipsis")


def state_line(view: StageView) -> str:
    """``grpo: running, step 12/80, reward 0.41``, or how it ended."""
    parts: list[str] = [view.state]
    if view.state in ("done", "failed", "interrupted") and view.seconds:
        parts[0] += f" ({clock(view.seconds)})"
    if view.state in _WORKING and view.job_id:
        parts[0] += f" as job {view.job_id}"
    if text := detail(view):
        parts.append(text)
    line = f"{view.name}: {', '.join(parts)}"
    if view.state in ("failed", "interrupted") and view.log:
        line += f"\n  log: {view.log}"
    return line


def detail(view: StageView) -> str:
    """Phase, count and key values of a running stage; the message of any other."""
    progress = view.progress
    if view.state not in _WORKING or progress is None:
        return view.message
    count = f"{progress.done}/{progress.total}" if progress.total else ""
    parts = [" ".join(filter(None, [progress.phase, count]))]
    parts += [f"{name} {value:.4g}" for name, value in progress.values.items()]
    return ", ".join(filter(None, parts))


def states_counted(states: Iterable[str], order: Sequence[str] = TRIAL_STATES) -> dict[str, int]:
    """Number of stages per state, in this order."""
    found = Counter(states)
    return {state: found[state] for state in order if found[state]}


def states_text(counts: Mapping[str, int]) -> str:
    """``3 done, 1 failed``."""
    return ", ".join(f"{n} {state}" for state, n in counts.items())


def _at_work(views: Sequence[StageView]) -> list[StageView]:
    """For each trial the running stages, else the first waiting one."""
    found: dict[str, list[StageView]] = {}
    for view in views:
        found.setdefault(view.name.rpartition("/")[0], []).append(view)
    rows: list[StageView] = []
    for mine in found.values():
        busy = [v for v in mine if v.state in (*_WORKING, "paused")]
        rows += busy or [v for v in mine if v.state in ("queued", "waiting")][:1]
    return rows


def trials_text(trials: Mapping[str, Any]) -> str:
    """``4 trials: 3 done, 1 failed``."""
    counts = states_counted(trial.state for trial in trials.values())
    return f"{len(trials)} trials: {states_text(counts) or 'none'}"


def _is_reported(view: StageView) -> bool:
    """True if the end of a stage deserves a line."""
    doubtful = view.state in ("done", "skipped") and view.message.startswith("warning: ")
    return doubtful or view.state in ("failed", "interrupted", "blocked")


def _colon(message: str) -> str:
    return f": {message}" if message else ""
