"""Messages: a title, a few lines, the next command; and which pauses deserve one. Pure.

In: the state of a run or a sweep. Out: messages as JSON, of bounded size, without credentials. A
pause is reported once, however often its stages retry; pauses with the same cause are one.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from infra.host.secrets import masked
from infra.orchestrator.timeline import WHAT, rough
from infra.store.layout import call_title, is_sweep
from refiner_core.contract.types import StageView
from refiner_core.report.printing import counted, measured

#: A cause is over when no stage has been paused by it for so long.
_OVER_S = 600.0


class StageState(NamedTuple):
    """Current state of a stage: ``cause`` if it is paused, with ``reason`` in words."""

    cause: str = ""
    reason: str = ""


class Pauses:
    """The pauses of a call, by cause; one shorter than ``moment_s`` is not reported."""

    def __init__(self, moment_s: float) -> None:
        self._moment_s = moment_s
        self._began: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._told: set[str] = set()

    def look(
        self, statuses: Mapping[str, StageState], now: float, *, quiet: bool = False
    ) -> list[tuple[str, list[str], str]]:
        """New pauses: cause, paused stages, and the reason of the last; ``now`` in seconds.
        ``quiet``: report none yet."""
        over = [c for c, seen in self._seen.items() if now - seen > _OVER_S]
        for cause in over:
            del self._seen[cause], self._began[cause]
            self._told.discard(cause)
        stages: dict[str, list[str]] = {}
        for stage, status in statuses.items():
            if status.cause:
                stages.setdefault(status.cause, []).append(stage)
                self._began.setdefault(status.cause, now)
                self._seen[status.cause] = now
        new_events = [
            (cause, some, statuses[some[-1]].reason)
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


def what(cause: str) -> str:
    """A failure class in words."""
    said: Mapping[Any, str] = WHAT  # `cause` may be unknown
    return said.get(cause, cause.replace("_", " "))


def finished(
    topic: Topic, views: Mapping[str, StageView], numbers: Sequence[Mapping[str, Any]]
) -> Message:
    """Every stage is done: metrics before and after, and paths of the models."""
    done = [view for view in views.values() if view.state == "done"]
    text = f"{counted(len(done), 'stage')} done, {rough(sum(v.seconds for v in done))} of work."
    targets = (v.report["target"] for v in done if v.kind == "publish" and "target" in v.report)
    lines = [text, *number_lines(numbers), *(f"published: {t}" for t in dict.fromkeys(targets))]
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
        lines.append(f"{view.name}: {what(causes[view.name])}: {line(view.message)}")
        lines += [f"  log: {view.log}"] if view.log else []
    happened, then = "has failed", f"logs {first.name}"
    if first.state == "interrupted":  # it has given up
        happened, then = "stands still", "resume"
        lines.append(KEPT)
    cause = causes[first.name]
    happened += f": {first.name}, {what(cause)}"
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
    happened, stage = f"pauses: {what(cause)}", ", ".join(stages)
    return topic.message("paused", happened, text, then, stage=stage, cause=cause)


def sweep_ended(topic: Topic, wrong: Mapping[str, str], counts: str) -> Message:
    """No trial is running any more; ``wrong`` maps failed trials to reasons."""
    if not wrong:
        return topic.message("finished", "has finished", f"{counts}.", "report")
    lines = [f"{trial}: {line(why, 200)}" for trial, why in list(wrong.items())[:_LINES]]
    happened = f"has ended without {counted(len(wrong), 'trial')}"
    text, stages = "\n".join([f"{counts}.", *lines]), ", ".join(wrong)
    return topic.message("failed", happened, text, "status", stage=stages, cause="trial_failed")
