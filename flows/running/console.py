"""Progress on standard error, and what to do next when it is over.

In: the views of an orchestrator, again and again; of a sweep also how its trials stand. Out: plain
lines. Of a run these are one per change of a stage's state, and at most one every ten seconds about
its progress; of a sweep one per change of a trial's state. ``quiet`` leaves only warnings and
failures. `refiner status --watch` redraws a table. Standard output is never touched: it belongs to
``--json``.
"""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from infra.host.terminal import printable
from infra.orchestrator.timeline import first_line, rough
from refiner_core.contract.types import Progress, StageView
from refiner_core.report.printing import clock

_LINE_EVERY_S = 10.0
_WORKING = ("running", "reattached")
_NOT_YET = ("queued", "paused", "waiting")
_STATES = ("done", "skipped", "failed", "interrupted", "blocked", *_WORKING, *_NOT_YET)
#: Of trials, in the order in which they are counted.
TRIAL_STATES = ("done", "running", "waiting", "held", "interrupted", "failed")


class Console:
    """Shows an orchestrator's work on a stream, which may go away at any time: whoever closes the
    terminal, or stops reading, takes nothing with them. Safe to call from several threads.

    ``command`` is the command line that runs the same thing again, ``workspace`` its folder,
    ``run`` its record's id. All of them go into the commands that the summary proposes. ``trials``
    says how those of a sweep stand (``state``, ``reason``, ``run``); ``clock`` is in seconds,
    monotonic.
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
        self._lost = False
        self._trials = trials
        self._trial_states = dict.fromkeys(trials(), "waiting") if trials else {}
        self._command, self._workspace, self._run = tuple(command), workspace, run
        self._states: dict[str, str] = {}
        self._said: dict[str, tuple[float, Progress | None]] = {}

    def note(self, message: str) -> None:
        """Say something in between; left out when quiet."""
        if not self._quiet:
            self._print(message)

    def warn(self, message: str) -> None:
        """Say something that is amiss, but stops nothing."""
        self._print(f"warning: {message}")

    def _print(self, message: str) -> None:
        """A line, unless the terminal was closed or nobody reads: the work goes on without."""
        with self._lock:
            try:
                if not self._lost:
                    shown = printable(message) if self._stream.isatty() else message
                    print(shown, file=self._stream, flush=True)
            except (OSError, ValueError):
                self._lost = True

    def show(self, views: Mapping[str, StageView]) -> None:
        """Say what is news."""
        with self._lock:
            if self._trials is not None:
                self._note_trials(self._trials())
                return
            for view in views.values():
                self._note_change(view, self._clock())
            self._states.update({name: view.state for name, view in views.items()})

    def finish(self, views: Mapping[str, StageView]) -> None:
        """The last state of every stage, then the summary."""
        self.show(views)
        if self._trials is not None:
            trials = self._trials()
            if not self._quiet or any(t.state != "done" for t in trials.values()):
                self._print(f"{trials_text(trials)} in {rough(self._clock() - self._began)}")
            return
        if any(map(_is_told, views.values())) or not self._quiet:
            elapsed = self._clock() - self._began
            self._print("\n".join(self.summary(views, elapsed)))

    def summary(self, views: Mapping[str, StageView], elapsed_s: float) -> list[str]:
        """Lines: what was done, skipped, failed; where the logs are."""
        counts = states_counted((view.state for view in views.values()), _STATES)
        lines = [f"{states_text(counts) or 'nothing to do'} in {clock(elapsed_s)}"]
        for view in views.values():
            if _is_told(view):
                lines.append(f"  {view.name}: {view.state}{_colon(view.message)}")
                if view.log and view.state not in ("done", "skipped"):
                    lines.append(f"    log: {view.log}")
        return lines

    def next_commands(self, views: Mapping[str, StageView]) -> list[str]:
        """Commands that make sense now, most useful first; none where all went well and nobody
        wants to hear of it."""
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

    def _note_change(self, view: StageView, now: float) -> None:
        if view.state != self._states.get(view.name, "waiting"):
            self._said[view.name] = (now, view.progress)
            if not self._quiet or view.state == "failed":
                self._print(state_line(view))
            return
        said_at, said = self._said.setdefault(view.name, (now, None))
        told = not self._quiet and now - said_at >= _LINE_EVERY_S
        if told and view.state in _WORKING and view.progress not in (None, said):
            self._said[view.name] = (now, view.progress)
            self._print(state_line(view))

    def _note_trials(self, trials: Mapping[str, Any]) -> None:
        for name, trial in trials.items():
            if self._trial_states.get(name, "waiting") == trial.state:
                continue
            self._trial_states[name] = trial.state
            # Why others are held is said once, for all of them.
            if trial.state == "failed" or (not self._quiet and trial.state != "held"):
                run = f" (run {trial.run})" if trial.state == "running" else ""
                why = _colon(first_line(trial.reason, 300))
                self._print(f"{name}: {trial.state}{run}{why}")


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
    """Phase, count and key values while it works; its message otherwise."""
    progress = view.progress
    if view.state not in _WORKING or progress is None:
        return view.message
    count = f"{progress.done}/{progress.total}" if progress.total else ""
    parts = [" ".join(filter(None, [progress.phase, count]))]
    parts += [f"{name} {value:.4g}" for name, value in progress.values.items()]
    return ", ".join(filter(None, parts))


def states_counted(states: Iterable[str], order: Sequence[str] = TRIAL_STATES) -> dict[str, int]:
    """How many there are of each state that there is."""
    found = Counter(states)
    return {state: found[state] for state in order if found[state]}


def states_text(counts: Mapping[str, int]) -> str:
    """``3 done, 1 failed``."""
    return ", ".join(f"{n} {state}" for state, n in counts.items())


def trials_text(trials: Mapping[str, Any]) -> str:
    """``4 trials: 3 done, 1 failed``."""
    counts = states_counted(trial.state for trial in trials.values())
    return f"{len(trials)} trials: {states_text(counts) or 'none'}"


def _is_told(view: StageView) -> bool:
    """True if somebody should hear of how it ended."""
    doubtful = view.state in ("done", "skipped") and view.message.startswith("warning: ")
    return doubtful or view.state in ("failed", "interrupted", "blocked")


def _colon(message: str) -> str:
    return f": {message}" if message else ""
