"""Watchers of runs and sweeps, and their messages: a title, a few lines, the next command.

In: views, repeatedly, as for a terminal. Out: messages as JSON about pauses, a failed trial, limits
and the end, of bounded size, without credentials. A pause is reported once, however often its
stages retry; pauses with the same cause are one. A watcher never raises and never waits, except for
a limited time in ``close``: notifications are no part of the work. Trials of a sweep send no
messages of their own: the first failure is reported at once, the others at the end.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import textwrap
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flows.evaluations import evaluations_of
from flows.notifying.sender import ChannelError, Sender, send
from flows.running.console import trials_text
from flows.running.foreground import CallObserver
from infra.host.processes import ProcessId, host_name
from infra.host.secrets import masked
from infra.jobs.failures import in_words
from infra.orchestrator.reconcile import paused_after
from infra.orchestrator.timeline import rough
from infra.store.layout import call_title, is_sweep
from infra.store.orchestrators import OrchestratorProcess
from infra.store.workspace import Workspace
from refiner_core.contract.config import NotifyConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord, SweepRecord
from refiner_core.contract.sections.steering import alarms_of, check_notify
from refiner_core.contract.types import StageView
from refiner_core.report.printing import counted, measured

#: A cause is over when no stage has been paused by it for so long.
_OVER_S = 600.0


class Pauses:
    """The pauses of a call, by cause; one shorter than ``moment_s`` is not reported."""

    def __init__(self, moment_s: float) -> None:
        self._moment_s = moment_s
        self._began: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._told: set[str] = set()

    def observe(
        self, causes: Mapping[str, tuple[str, str]], now: float, *, quiet: bool = False
    ) -> list[tuple[str, list[str], str]]:
        """New pauses: cause, paused stages, and the reason of the last.

        Parameters
        ----------
        causes
            By stage: cause (empty: not paused), and the reason in words.
        now
            Seconds.
        quiet
            Report none yet.
        """
        over = [c for c, seen in self._seen.items() if now - seen > _OVER_S]
        for cause in over:
            del self._seen[cause], self._began[cause]
            self._told.discard(cause)
        stages: dict[str, list[str]] = {}
        for stage, (cause, _) in causes.items():
            if cause:
                stages.setdefault(cause, []).append(stage)
                self._began.setdefault(cause, now)
                self._seen[cause] = now
        new_events = [
            (cause, some, causes[some[-1]][1])
            for cause, some in stages.items()
            if now - self._began[cause] >= self._moment_s and cause not in self._told and not quiet
        ]
        self._told.update(cause for cause, *_ in new_events)
        return new_events


MESSAGE_VERSION = 1
Kind = Literal["finished", "failed", "paused", "stopped", "test"]
Message = Mapping[str, Any]
#: Maximum length of title, text, and other fields, in characters: chat servers cut at 2000.
_TITLE, _TEXT, _FIELD = 200, 1300, 600
_LINES = 8
KEPT = "What is saved is kept; it continues from there."


@dataclass(frozen=True)
class Topic:
    """Subject of all messages about one call."""

    call: str
    recipe: str
    workspace: str
    host: str

    @property
    def name(self) -> str:
        """The run's id, or the sweep's name."""
        return call_title(self.call).partition(" ")[2]

    def message(
        self, kind: Kind, happened: str, text: str, then: str, *, stage: str = "", cause: str = ""
    ) -> Message:
        """A message about the call.

        Parameters
        ----------
        happened
            Title, after the name of the call.
        then
            Suggested next command, without the name of the call.
        stage, cause
            Stages (or trial), and failure class; empty if the message is about all of the call, or
            if all is well.
        """
        sweep, where = is_sweep(self.call), f"workspace={self.workspace}"
        on = [] if then.partition(" ")[0] in ("disk", "show") else [self.name]
        next_ = shlex.join(["refiner", *then.split(), *on, where])
        title = " ".join(f"{'sweep ' if sweep else ''}{self.name} {happened}".split())
        fields = {
            **{"call": self.call, "recipe": self.recipe, "run": "" if sweep else self.name},
            **{"sweep": self.name if sweep else "", "stage": stage, "cause": cause},
            **{"workspace": self.workspace, "next": next_, "host": self.host},
        }
        return {
            **{"version": MESSAGE_VERSION, "kind": kind, "title": _cut(masked(title), _TITLE)},
            "text": f"{_cut(masked(text), _TEXT)}\nNext: {_cut(next_, _FIELD)}",
            **{name: _cut(value, _FIELD) for name, value in fields.items()},
        }


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 2]} …"


def line(text: str, limit: int = 500) -> str:
    """The text in one line, with the fix; longer than in a table."""
    return textwrap.shorten(text, limit, placeholder=" …")


def finished(
    topic: Topic, views: Mapping[str, StageView], numbers: Sequence[Mapping[str, Any]]
) -> Message:
    """Every stage is done: remarks on stages, metrics before and after, paths of the models."""
    done = [view for view in views.values() if view.state == "done"]
    text = f"{counted(len(done), 'stage')} done, {rough(sum(v.seconds for v in done))} of work."
    targets = (v.report["target"] for v in done if v.kind == "publish" and "target" in v.report)
    lines = [text, *(f"{view.name}: {view.message}" for view in done if view.message)]
    lines += [*number_lines(numbers), *(f"published: {t}" for t in dict.fromkeys(targets))]
    return topic.message("finished", "has finished", "\n".join(lines), "report")


def number_lines(numbers: Sequence[Mapping[str, Any]]) -> list[str]:
    """``reward: 0.000 (base) -> 8.633 [8.324, 8.896] (grpo)``, by the main decoding."""
    from refiner_core.evaluation.metrics import main_metrics  # imports numpy: 0.3 s

    known = [n for n in numbers if n["stage"] != "random_copier" and n["value"] is not None]
    main = [n for n in known if n["decoding"] == "sampled" and not n["under"]] or known
    if not main:
        return []
    by_model: dict[str, dict[str, Mapping[str, Any]]] = {}
    for n in main:
        if all(n[key] == main[0][key] for key in ("under", "decoding")):
            by_model.setdefault(str(n["stage"]), {})[str(n["metric"])] = n
    (first, before), (last, after) = (list(by_model.items())[i] for i in (0, -1))
    lines = [f"{main[0]['decoding']} decoding:"]
    for metric in [m for m in main_metrics(str(n["metric"]) for n in main) if m in after][:5]:
        was = f"{before[metric]['value']:.3f} ({first}) -> " if metric in before else ""
        lines.append(f"  {metric}: {was * (first != last)}{measured(after[metric])} ({last})")
    return lines


def failed(topic: Topic, views: Mapping[str, StageView], causes: Mapping[str, str]) -> Message:
    """A stage has failed, or has given up waiting; ``causes`` maps stages to failure classes."""
    ended = [v for v in views.values() if v.state in ("failed", "interrupted") and v.name in causes]
    ended.sort(key=lambda v: (v.state != "failed", v.message.startswith("needs ")))
    first, lines = ended[0], []
    for view in ended[:_LINES]:
        lines.append(f"{view.name}: {in_words(causes[view.name])}: {line(view.message)}")
        lines += [f"  log: {view.log}"] if view.log else []
    happened, then = "has failed", f"logs {first.name}"
    if first.state == "interrupted":  # it has given up
        happened, then = "stands still", "resume"
        lines.append(KEPT)
    cause = causes[first.name]
    happened += f": {first.name}, {in_words(cause)}"
    stages = ", ".join(v.name for v in ended)
    return topic.message("failed", happened, "\n".join(lines), then, stage=stages, cause=cause)


def gone(topic: Topic, why: str, cause: str) -> Message:
    """The orchestrator has ended with an error, or without a message."""
    text = f"{why}\nSubmitted jobs may continue; what is saved is kept."
    return topic.message("failed", "has no orchestrator any more", text, "resume", cause=cause)


def stopped(topic: Topic, why: str) -> Message:
    """The call was stopped by a request."""
    text = f"{why[:1].upper()}{why[1:]}. {KEPT}"
    return topic.message("stopped", "was stopped", text, "resume", cause="asked")


def paused(topic: Topic, cause: str, stages: Sequence[str], reason: str) -> Message:
    """A pause has lasted for some time."""
    text = f"{', '.join(stages)}: {line(reason)}\nIt continues by itself when that is over."
    then = "disk" if cause == "disk_full" else "status"
    happened, stage = f"pauses: {in_words(cause)}", ", ".join(stages)
    return topic.message("paused", happened, text, then, stage=stage, cause=cause)


def sweep_ended(topic: Topic, wrong: Mapping[str, str], counts: str) -> Message:
    """No trial is running any more; ``wrong`` maps failed trials to reasons."""
    if not wrong:
        return topic.message("finished", "has finished", f"{counts}.", "report")
    lines = [f"{trial}: {line(why, 200)}" for trial, why in list(wrong.items())[:_LINES]]
    happened = f"has ended without {counted(len(wrong), 'trial')}"
    text, stages = "\n".join([f"{counts}.", *lines]), ", ".join(wrong)
    return topic.message("failed", happened, text, "status", stage=stages, cause="trial_failed")


# ---------------------------------------------------------------- watchers


log = logging.getLogger(__name__)


class _CallNotifier(CallObserver):
    """Watcher of a run or a sweep.

    Parameters
    ----------
    call, record, notify, workspace
        The call, the selection of messages, and the workspace.
    before, resumed
        The previous orchestrator: what had ended well is not reported again after a resume.
    print_line
        Receives failures.
    sender, clock
        Sends messages; seconds, monotonic.
    """

    def __init__(
        self,
        call: str,
        record: RunRecord | SweepRecord,
        notify: NotifyConfig,
        workspace: Workspace,
        before: OrchestratorProcess,
        *,
        resumed: bool,
        print_line: Callable[[str], None],
        sender: Sender | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topic = Topic(call, record.recipe, str(workspace.root), host_name())
        events = workspace.layout.run(call).events
        self._sender = sender or Sender(notify, record.started_at, events, print_line)
        self._workspace = workspace
        #: Whether its end is reported; set, too, once anything has run.
        self._is_news = resumed and not (before.standing == "ended" and before.exit_code == 0)
        self._clock, self._pauses = clock, Pauses(60.0 * notify.pause_min)
        self._asked = ""
        why = f"Its orchestrator, {ProcessId.of()}, is gone (killed, or out of memory)."
        last = gone(self.topic, why, "orchestrator_gone")
        self._safely(lambda: self._sender.begin(last))

    def stop_requested(self, why: str) -> None:
        """A stop was requested."""
        self._asked = why

    def show(self, views: Mapping[str, StageView]) -> None:
        """Receive the views of all stages."""
        self._is_news |= not all(view.terminal for view in views.values())
        self._safely(lambda: self._look(views))

    def over(self, views: Mapping[str, StageView]) -> None:
        """The call has ended."""
        self._safely(lambda: self._end(views))
        self._safely(self._sender.end)

    def broke(self, error: BaseException) -> None:
        """The work on it has ended with an error; a second Ctrl-C is one."""
        if isinstance(error, KeyboardInterrupt):
            why = "it was ended by Ctrl-C; submitted jobs may continue"
            self._tell(stopped(self.topic, why))
        else:
            why = f"{type(error).__name__}: {line(str(error))}"
            self._tell(gone(self.topic, why, "error"))
        self._safely(self._sender.end)

    def close(self) -> None:
        """Wait a while for messages in flight; Ctrl-C leaves them to the sender."""
        with contextlib.suppress(KeyboardInterrupt):  # the run is over, and has its exit code
            self._safely(self._sender.close)

    def _look(self, views: Mapping[str, StageView]) -> None:
        """Send messages for changes. ARM/seed1/grpo is a stage of the trial ARM/seed1."""
        causes = {" ".join(name.rsplit("/", 1)): _pause_of(view) for name, view in views.items()}
        for pause in self._pauses.observe(causes, self._clock(), quiet=self._sender.quiet):
            self._tell(paused(self.topic, *pause))

    @abstractmethod
    def _end(self, views: Mapping[str, StageView]) -> None:
        """Report the end of the call."""

    def _why_stopped(self) -> str:
        asked = self._workspace.cancel_asked(self.topic.call)
        return self._asked or (f"cancelled by {asked.get('by', 'somebody')}" if asked else "")

    def _tell(self, message: Message) -> None:
        self._safely(lambda: self._sender.tell(message))

    def _safely(self, action: Callable[[], None]) -> None:
        """A bug here must not end a run."""
        try:
            action()
        except Exception as error:
            log.warning("notifications for %s do not work", self.topic.name, exc_info=error)


class RunNotifier(_CallNotifier):
    """Watches one run."""

    def __init__(self, plan: Plan, *common: Any, **more: Any) -> None:
        super().__init__(*common, **more)
        self._plan = plan

    def _end(self, views: Mapping[str, StageView]) -> None:
        states = {view.state for view in views.values()}
        if states <= {"done", "skipped"}:
            if self._is_news:
                self._tell(finished(self.topic, views, self._numbers()))
        elif "failed" not in states and (why := self._why_stopped()):
            self._tell(stopped(self.topic, why))
        else:
            causes = {
                view.name: self._cause(view)
                for view in views.values()
                if view.state == "failed"
                or (view.state == "interrupted" and not view.message.startswith("needs "))
            }
            self._tell(failed(self.topic, views, causes))

    def _numbers(self) -> list[dict[str, Any]]:
        try:
            return evaluations_of(self._plan, self._workspace)
        except (OSError, KeyError, RefinerError) as error:
            log.warning("the message has no numbers: %s", error)
            return []

    def _cause(self, view: StageView) -> str:
        """The failure class of a stage that has ended badly."""
        if view.state == "interrupted" and view.exit_code == 5:
            return "disk_full"
        try:
            record = self._workspace.read_record(self._plan.by_name[view.name].id)
        except (OSError, RefinerError) as error:  # the failure is known nevertheless
            log.warning("why %s has failed cannot be read: %s", view.name, error)
            return "failed"
        last = record.attempts[-1] if record is not None and record.attempts else None
        return last.outcome.failure if last is not None and last.outcome is not None else "failed"


def _pause_of(view: StageView) -> tuple[str, str]:
    """Cause of a stage's pause (empty: not paused), and its message."""
    cause = paused_after(view.message) if view.state in ("paused", "waiting") else ""
    return cause or ("disk_full" if view.state == "paused" else ""), view.message


class SweepNotifier(_CallNotifier):
    """Watches one sweep, a :class:`flows.sweeping.admission.Admission`."""

    def __init__(self, sweep: Any, *common: Any, **more: Any) -> None:
        super().__init__(*common, **more)
        self._sweep = sweep
        self._told_held = self._told_trial = False
        self._was_wrong: frozenset[str] | None = None

    def _look(self, views: Mapping[str, StageView]) -> None:
        super()._look(views)
        if self._sweep.held:
            self._notify_waiting()
        trials = self._sweep.standing()
        wrong = frozenset(name for name, word in trials.items() if word.state == "failed")
        self._was_wrong = wrong if self._was_wrong is None else self._was_wrong
        if (new := sorted(wrong - self._was_wrong)) and not self._told_trial:
            self._told_trial = True
            text = f"{new[0]}: {line(trials[new[0]].reason)}\nThe other trials continue."
            about = {"stage": new[0], "cause": "trial_failed"}
            happened = f"continues, but {new[0]} has failed"
            self._tell(self.topic.message("failed", happened, text, "status", **about))

    def _notify_waiting(self) -> None:
        if not self._told_held:
            why = line(self._sweep.held, 800)
            text = f"No further trial begins: {why}\nRunning trials finish."
            self._tell(self.topic.message("paused", "is held", text, "status", cause="held"))
        self._told_held = True

    def _end(self, _: Mapping[str, StageView]) -> None:
        trials = self._sweep.standing()
        bad = {n: w for n, w in trials.items() if w.state in ("failed", "interrupted")}
        any_failed = any(word.state == "failed" for word in bad.values())
        if not any_failed and (why := self._why_stopped()):
            self._tell(stopped(self.topic, why))
        elif self._sweep.held and not any_failed:
            self._notify_waiting()
        elif bad or self._is_news:
            wrong = {name: word.reason for name, word in bad.items()}
            self._tell(sweep_ended(self.topic, wrong, trials_text(trials)))


# ---------------------------------------------------------------- tests


def notify_settings(recipe: str, overrides: Sequence[str]) -> RecipeConfig:
    """A recipe with a usable `notify` section.

    Parameters
    ----------
    recipe, overrides
        As for ``refiner run``.

    Raises
    ------
    ConfigurationError
        It is unusable, or names no channel.
    """
    config = load_recipe(recipe, overrides)
    check_notify(config.notify)
    if not alarms_of(config.notify):
        raise ConfigurationError(
            f"{recipe} names no channel for notifications.",
            expected="notify.urls or notify.command",
            fix="add one, e.g. notify.urls=[MY_HOOK] after `export MY_HOOK=https://…`, or "
            "notify.command='cat >> ~/told.jsonl'",
        )
    return config


def try_channels(config: RecipeConfig, *, started: Callable[[str], None]) -> list[dict[str, Any]]:
    """Send a test message through every channel of ``config``, one after the other; ``started``
    receives each name. Returns a row per channel: ``channel``, ``seconds``, ``delivered``, and
    ``why`` not. Raises nothing."""
    topic = Topic("test", config.recipe, str(Path(config.workspace).absolute()), host_name())
    told = ", ".join(config.notify.on) or "nothing: notify.on is empty"
    text = f"This is a test. Notifications for runs of {config.recipe}: {told}."
    message = topic.message("test", "of the channels", text, "show notify")
    tried = []
    for alarm in alarms_of(config.notify):
        started(alarm.name)
        began, why = time.monotonic(), ""
        try:
            send(alarm, message)
        except ChannelError as error:
            why = str(error)
        seconds = round(time.monotonic() - began, 2)
        row = {"channel": alarm.name, "seconds": seconds, "why": why, "delivered": not why}
        tried.append(row)
    return tried
