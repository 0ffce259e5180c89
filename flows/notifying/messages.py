"""Messages: a title, a few lines, the next command; and which pauses are worth one. Pure.

In: what is known of a run or a sweep. Out: messages as JSON, of bounded size, without credentials.
A pause is told once, however often its stages try in vain; pauses of one cause are one, whatever
their stages.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from infra.host.secrets import masked
from infra.orchestrator.timeline import WHAT, rough
from infra.store.layout import call_title, is_sweep
from refiner_core.contract.types import StageView
from refiner_core.report.printing import counted, measured


class Sight(NamedTuple):
    """One stage as it is now: ``cause`` says that it stands still, ``reason`` so in words; ``done``
    is its progress, and ``ended`` that nothing more will happen to it in this call."""

    cause: str = ""
    reason: str = ""
    done: int = 0
    ended: bool = False


class Pauses:
    """The pauses of a call, by cause; one that is over within ``moment_s`` is not told of."""

    def __init__(self, moment_s: float) -> None:
        self._moment_s = moment_s
        self._since: dict[str, float] = {}
        self._told: set[str] = set()
        self._marks: dict[str, dict[str, int]] = {}

    def look(
        self, sights: Mapping[str, Sight], now: float, *, quiet: bool = False
    ) -> list[tuple[str, list[str], str]]:
        """Pauses that are news: cause, stages that stand still for it, and the reason of the last;
        ``now`` in seconds. ``quiet``: no pause is, yet."""
        reasons: dict[str, str] = {}
        for stage, sight in sights.items():
            if sight.cause:
                self._since.setdefault(sight.cause, now)
                marks = self._marks.setdefault(sight.cause, {})
                marks[stage] = max(sight.done, marks.get(stage, 0))
                reasons[sight.cause] = sight.reason
        for cause, marks in list(self._marks.items()):
            for stage, mark in list(marks.items()):
                sight = sights.get(stage, Sight(ended=True))
                if sight.ended or (not sight.cause and sight.done > mark):
                    del marks[stage]
            if not marks:
                del self._marks[cause], self._since[cause]
                self._told.discard(cause)
        lasting = {c for c, since in self._since.items() if now - since >= self._moment_s}
        news = [c for c in reasons if c in lasting - self._told and not quiet]
        self._told.update(news)
        return [(cause, list(self._marks[cause]), reasons[cause]) for cause in news]


MESSAGE_VERSION = 1
Kind = Literal["finished", "failed", "paused", "stopped", "test"]
Message = Mapping[str, Any]
#: Longest title, text, and any other field, in characters: chat servers cut at 2000.
_TITLE, _TEXT, _FIELD = 200, 1300, 600
_CUT = " …"
_METRICS, _LINES = 5, 8
_LEFT, _GOES_ON = "is not worked on any more", "Jobs that it had submitted may go on"


@dataclass(frozen=True)
class Topic:
    """Topic of all messages about one call."""

    call: str
    recipe: str
    workspace: str
    host: str

    @property
    def name(self) -> str:
        """The run's id, or the sweep's name."""
        return call_title(self.call).partition(" ")[2]

    def message(
        self,
        kind: Kind,
        happened: str,
        text: str,
        then: str = "status",
        *,
        stage: str = "",
        cause: str = "",
        next_: str = "",
    ) -> Message:
        """A message about it.

        Parameters
        ----------
        happened
            Follows its name in the title.
        then, next_
            What to type now: words of a command on it, or a whole command.
        stage, cause
            Which stages (or trial), and which failure class; empty where it is about all, or all is
            well.
        """
        words = ["refiner", *then.split(), self.name, f"workspace={self.workspace}"]
        sweep, next_ = is_sweep(self.call), next_ or shlex.join(words)
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
    return text if len(text) <= limit else text[: limit - len(_CUT)] + _CUT


# ---------------------------------------------------------------- the end of a run


def finished(
    topic: Topic, views: Mapping[str, StageView], numbers: Sequence[Mapping[str, Any]]
) -> Message:
    """Every stage is done: numbers before and after, and where the models lie."""
    seconds = sum(v.seconds for v in views.values() if v.state == "done")
    states = [v.state for v in views.values()]
    there = states.count("skipped")
    lines = [
        f"{counted(states.count('done'), 'stage')} done, {rough(seconds)} of work"
        + (f"; {there} were there already." if there else "."),
        *number_lines(numbers),
        *dict.fromkeys(
            f"published: {v.report['target']}"
            for v in views.values()
            if v.kind == "publish" and "target" in v.report
        ),
    ]
    return topic.message("finished", "has finished", "\n".join(lines), "report")


def _line(text: str, limit: int) -> str:
    """The text in one line; unlike a table's word, with what mends it."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def number_lines(numbers: Sequence[Mapping[str, Any]]) -> list[str]:
    """``reward: 0.000 (base) -> 8.633 [8.324, 8.896] (grpo)``, by the main decoding."""
    from refiner_core.evaluation.metrics import main_metrics, of_tasks  # brings numpy: 0.3 s

    known = [n for n in numbers if n["stage"] != "random_copier" and n["value"] is not None]
    if not known:
        return []
    sampled = [n for n in known if n["decoding"] == "sampled"] or known
    first = sampled[0]
    here = [n for n in sampled if all(n[k] == first[k] for k in ("under", "decoding"))]
    models = list(dict.fromkeys(str(n["stage"]) for n in here))
    found = {(str(n["stage"]), str(n["metric"])): n for n in here}
    of = "tasks" if any(of_tasks(str(n["metric"])) for n in here) else "prompts"
    under = f"protocol {first['under']}" if first["under"] else f"held-out {of}"
    lines: list[str] = []
    for metric in main_metrics(str(n["metric"]) for n in here):
        after = found.get((models[-1], metric))
        if after is None or len(lines) == _METRICS:
            continue
        text = f"  {metric}: "
        if (before := found.get((models[0], metric))) is not None and len(models) > 1:
            text += f"{before['value']:.3f} ({models[0]}) -> "
        lines.append(f"{text}{measured(after)} ({models[-1]})")
    return [f"{first['decoding']} decoding, {under}:", *lines] if lines else []


def failed(topic: Topic, views: Mapping[str, StageView], causes: Mapping[str, str]) -> Message:
    """A stage has failed, or has given up waiting; ``causes`` maps stages to failure classes."""
    ended = [v for v in views.values() if v.state in ("failed", "interrupted") and v.name in causes]
    ended.sort(key=lambda v: (v.state != "failed", v.message.startswith("needs ")))
    first, lines = ended[0], []
    for view in ended[:_LINES]:
        lines.append(f"{view.name}: {_what(causes[view.name])}: {_line(view.message, 500)}")
        lines += [f"  log: {view.log}"] if view.log else []
    happened, then = "has failed", f"logs {first.name}"
    if first.state == "interrupted":  # it has given up
        happened, then = "stands still", "resume"
        lines.append("What is saved is kept; it goes on from there.")
    done = sum(v.state in ("done", "skipped") for v in views.values())
    lines.append(f"{done} of {len(views)} stages are done.")
    stages, cause = ", ".join(v.name for v in ended), causes[first.name]
    happened += f": {first.name}, {_what(cause)}"
    return topic.message("failed", happened, "\n".join(lines), then, stage=stages, cause=cause)


def _what(cause: str) -> str:
    said: Mapping[Any, str] = WHAT  # `cause` may be another word
    return said.get(cause, cause.replace("_", " "))


def broke(topic: Topic, error: BaseException) -> Message:
    """The orchestrator itself has ended with an error."""
    said = _line(str(error).strip() or type(error).__name__, 800)
    text = f"{type(error).__name__}: {said}\n{_GOES_ON}; what is saved is kept."
    return topic.message("failed", _LEFT, text, "resume", cause="error")


def gone(topic: Topic, process: str) -> Message:
    """The orchestrator has ended without a word."""
    text = (
        f"Its orchestrator, {process}, is gone without a word (killed, or out of memory).\n"
        f"{_GOES_ON}; nothing begins by itself until it is resumed."
    )
    return topic.message("failed", _LEFT, text, "resume", cause="orchestrator_gone")


def stopped(topic: Topic, why: str) -> Message:
    """Somebody has stopped it."""
    text = f"{why[:1].upper()}{why[1:]}. What is saved is kept; it goes on from there."
    return topic.message("stopped", "was stopped", text, "resume", cause="asked")


# ---------------------------------------------------------------- in between


def paused(topic: Topic, cause: str, stages: Sequence[str], reason: str) -> Message:
    """A pause has lasted."""
    named = ", ".join(stages[:_LINES]) + _more(stages)
    text = f"{named}: {_line(reason, 500)}\nIt goes on by itself as soon as that is over."
    full = cause == "disk_full" and not is_sweep(topic.call)
    next_ = shlex.join(["refiner", "disk", f"workspace={topic.workspace}"]) if full else ""
    happened, stage = f"pauses: {_what(cause)}", ", ".join(stages)
    return topic.message("paused", happened, text, stage=stage, cause=cause, next_=next_)


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - _LINES} more" if len(names) > _LINES else ""


# ---------------------------------------------------------------- sweeps


def trial_failed(topic: Topic, trial: str, reason: str, counts: str) -> Message:
    """The first trial of this call that has failed; the others go on."""
    happened = f"goes on, but {trial} has failed"
    text = f"{trial}: {_line(reason, 600)}\nThe other trials go on: {counts}."
    return topic.message("failed", happened, text, stage=trial, cause="trial_failed")


def held(topic: Topic, why: str) -> Message:
    """Nothing more is begun."""
    text = f"Nothing more is begun: {_line(why, 800)}\nWhat runs goes on to its end."
    return topic.message("paused", "is held", text, cause="held")


def sweep_ended(topic: Topic, wrong: Mapping[str, str], counts: str) -> Message:
    """No trial is at work any more; ``wrong`` maps trials that have failed to why."""
    if not wrong:
        return topic.message("finished", "has finished", f"{counts}.", "report")
    lines = [f"{trial}: {_line(why, 200)}" for trial, why in list(wrong.items())[:_LINES]]
    text = "\n".join([f"{counts}.", *lines]) + _more(list(wrong))
    happened = f"has ended without {counted(len(wrong), 'trial')}"
    return topic.message("failed", happened, text, stage=", ".join(wrong), cause="trial_failed")
