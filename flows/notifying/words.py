"""What messages say: a title, a few lines, the next command. Pure.

In: what is known of a run or a sweep. Out: a :class:`~flows.notifying.message.Message` each.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.notifying.message import Kind, Message
from flows.notifying.pauses import Change
from infra.campaign.timeline import WHAT, rough
from infra.store.layout import call_title, is_sweep
from refiner_core.contract.views import StageView
from refiner_core.evaluation.metrics import main_metrics, of_tasks

#: Why nothing goes on, where it is no failure class.
GONE, HELD, ASKED = "orchestrator_gone", "held", "asked"
TRIAL = "trial_failed"
#: Causes of messages about something that has failed, after which the call may go on all the same.
GOES_ON = (GONE, TRIAL)
_METRICS, _LINES = 5, 8
#: What a pause needs before it ends by itself.
_NEEDS = {
    "disk_full": "It goes on by itself as soon as there is room; `refiner disk` says what may go.",
    "judge_outage": "It tries again by itself; look whether the judge answers.",
    "environment_outage": "It tries again by itself; look at the environment's servers.",
    "hub_outage": "It tries again by itself; what is trained is safe.",
    "launch_failure": "It tries again by itself; look whether the scheduler answers.",
    "system_outage": "It goes on by itself; look whether scheduler and file system answer.",
}


@dataclass(frozen=True)
class Topic:
    """What all messages about one call have in common."""

    call: str
    recipe: str
    workspace: str
    host: str

    @property
    def name(self) -> str:
        """The run's id, or the sweep's name."""
        return call_title(self.call).partition(" ")[2]

    def command(self, *words: str) -> str:
        """``refiner …`` on it, from any folder."""
        return shlex.join(["refiner", *words, self.name, f"workspace={self.workspace}"])

    def message(
        self, key: str, kind: Kind, happened: str, text: str, next_: str, **more: str
    ) -> Message:
        """A message about it; ``happened`` follows its name in the title."""
        title = f"{'sweep ' if is_sweep(self.call) else ''}{self.name} {happened}"
        return Message(
            key=key,
            kind=kind,
            title=title,
            text=text,
            call=self.call,
            recipe=self.recipe,
            workspace=self.workspace,
            next=next_,
            host=self.host,
            **more,
        ).bounded()


# ---------------------------------------------------------------- the end of a run


def finished(
    topic: Topic,
    key: str,
    views: Mapping[str, StageView],
    numbers: Sequence[Mapping[str, Any]],
) -> Message:
    """Every stage is done: numbers before and after, and where the models lie."""
    seconds = sum(v.seconds for v in views.values() if v.state == "done")
    states = [v.state for v in views.values()]
    there = states.count("skipped")
    lines = [
        f"{_counted(states.count('done'), 'stage')} done, {rough(seconds)} of work"
        + (f"; {there} were there already." if there else "."),
        *number_lines(numbers),
        *dict.fromkeys(
            f"published: {v.report['target']}"
            for v in views.values()
            if v.kind == "publish" and "target" in v.report
        ),
    ]
    return topic.message(key, "finished", "has finished", "\n".join(lines), topic.command("report"))


def _line(text: str, limit: int) -> str:
    """The text in one line; unlike a table's word, with what mends it."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def number_lines(numbers: Sequence[Mapping[str, Any]]) -> list[str]:
    """``reward: 0.000 (base) -> 8.633 [8.324, 8.896] (grpo)``, by the main decoding."""

    measured = [n for n in numbers if n["stage"] != "random_copier" and n["value"] is not None]
    if not measured:
        return []
    sampled = [n for n in measured if n["decoding"] == "sampled"] or measured
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
        lines.append(f"{text}{_with_interval(after)} ({models[-1]})")
    return [f"{first['decoding']} decoding, {under}:", *lines] if lines else []


def _with_interval(number: Mapping[str, Any]) -> str:
    if number["low"] is None:
        return f"{number['value']:.3f}"
    return f"{number['value']:.3f} [{number['low']:.3f}, {number['high']:.3f}]"


def failed(
    topic: Topic, key: str, views: Mapping[str, StageView], causes: Mapping[str, str]
) -> Message:
    """A stage has failed, or has given up waiting; ``causes`` maps stages to failure classes."""
    ended = [v for v in views.values() if v.state in ("failed", "interrupted") and v.name in causes]
    ended.sort(key=lambda v: (v.state != "failed", v.message.startswith("needs ")))
    lines = []
    for view in ended[:_LINES]:
        lines.append(f"{view.name}: {_what(causes[view.name])}: {_line(view.message, 500)}")
        if view.log:
            lines.append(f"  log: {view.log}")
    first = ended[0]
    given_up = first.state == "interrupted"
    if given_up:
        lines.append("What is saved is kept; it goes on from there.")
    states = [v.state for v in views.values()]
    lines.append(
        f"{states.count('done') + states.count('skipped')} of {len(states)} stages are done."
    )
    happened = f"{'stands still' if given_up else 'has failed'}: {first.name}, " + _what(
        causes[first.name]
    )
    next_ = topic.command("resume") if given_up else topic.command("logs", first.name)
    return topic.message(
        key,
        "failed",
        happened,
        "\n".join(lines),
        next_,
        stage=", ".join(v.name for v in ended),
        cause=causes[first.name],
    )


def _what(cause: str) -> str:
    known = (said for failure, said in WHAT.items() if failure == cause)
    return next(known, cause.replace("_", " "))


def broke(topic: Topic, key: str, error: BaseException) -> Message:
    """The orchestrator itself has ended with an error."""
    said = str(error).strip() or type(error).__name__
    text = (
        f"{type(error).__name__}: {_line(said, 800)}\n"
        "Jobs that it had submitted may go on; what is saved is kept."
    )
    return topic.message(
        key, "failed", "is not worked on any more", text, topic.command("resume"), cause="error"
    )


def gone(topic: Topic, key: str, process: str) -> Message:
    """The orchestrator has ended without a word."""
    text = (
        f"Its orchestrator, {process}, is gone without a word (killed, or out of memory).\n"
        "Jobs that it had submitted may go on; nothing begins by itself until it is resumed."
    )
    return topic.message(
        key, "failed", "is not worked on any more", text, topic.command("resume"), cause=GONE
    )


def ended(topic: Topic, key: str, exit_code: int) -> Message:
    """The orchestrator has ended in order, and was killed before it could say more."""
    kinds: dict[int, Kind] = {0: "finished", 6: "stopped"}
    kind = kinds.get(exit_code, "failed")
    happened = {"finished": "has finished", "stopped": "was stopped"}.get(kind, "has failed")
    words = ("status",) if kind != "stopped" else ("resume",)
    text = f"It ended with exit code {exit_code}."
    return topic.message(key, kind, happened, text, topic.command(*words))


def stopped(topic: Topic, key: str, why: str) -> Message:
    """Somebody has stopped it."""
    text = f"{why[:1].upper()}{why[1:]}. What is saved is kept; it goes on from there."
    return topic.message(key, "stopped", "was stopped", text, topic.command("resume"), cause=ASKED)


# ---------------------------------------------------------------- in between


def changed(topic: Topic, key: str, change: Change) -> Message:
    """A pause has lasted, or is over."""
    stages, what = ", ".join(change.stages[:_LINES]), _what(change.cause)
    stages += f" and {len(change.stages) - _LINES} more" if len(change.stages) > _LINES else ""
    if change.kind == "paused":
        text = f"{stages}: {_line(change.reason, 500)}\n{_NEEDS.get(change.cause, '')}".strip()
        words = ("disk",) if change.cause == "disk_full" and not is_sweep(topic.call) else ()
        next_ = (
            shlex.join(["refiner", *words, f"workspace={topic.workspace}"])
            if words
            else topic.command("status")
        )
        happened = f"pauses: {what}"
    else:
        text = f"{stages} goes on" + (f" after {rough(change.seconds)}." if change.number else ".")
        next_, happened = topic.command("status"), f"goes on after a pause: {what}"
    return topic.message(
        key, change.kind, happened, text, next_, stage=", ".join(change.stages), cause=change.cause
    )


def went_on(topic: Topic, key: str, before: str) -> Message:
    """It is worked on again after its orchestrator had died."""
    text = f"Its orchestrator, {before}, was gone; it is worked on again."
    return topic.message(key, "resumed", "goes on", text, topic.command("status"), cause=GONE)


# ---------------------------------------------------------------- sweeps


def trial_failed(topic: Topic, key: str, trial: str, reason: str, counts: str) -> Message:
    """The first trial of this call that has failed; the others go on."""
    text = f"{trial}: {_line(reason, 600)}\nThe other trials go on: {counts}."
    return topic.message(
        key, "failed", f"goes on, but {trial} has failed", text, topic.command("status"),
        stage=trial, cause=TRIAL,
    )  # fmt: skip


def held(topic: Topic, key: str, why: str) -> Message:
    """Nothing more is begun."""
    text = f"Nothing more is begun: {_line(why, 800)}\nWhat runs goes on to its end."
    return topic.message(key, "paused", "is held", text, topic.command("status"), cause=HELD)


def sweep_ended(topic: Topic, key: str, wrong: Mapping[str, str], counts: str) -> Message:
    """No trial is at work any more; ``wrong`` maps trials that have failed to why."""
    lines = [f"{counts}."]
    lines += [f"{trial}: {_line(why, 200)}" for trial, why in list(wrong.items())[:_LINES]]
    if len(wrong) > _LINES:
        lines.append(f"and {len(wrong) - _LINES} more")
    if wrong:
        return topic.message(
            key, "failed", f"has ended without {_counted(len(wrong), 'trial')}", "\n".join(lines),
            topic.command("status"), stage=", ".join(wrong), cause=TRIAL,
        )  # fmt: skip
    return topic.message(key, "finished", "has finished", "\n".join(lines), topic.command("report"))
