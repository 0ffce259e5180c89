"""Sends messages from a process beside the orchestrator: ``python -m flows.notifying.sender``.

In: lines of JSON on standard input: the channels and what to say should the orchestrator die, then
a message each, at last ``end``. Out: the messages by every channel; what was not told stands in the
event log of the run, and is printed.

Why a process: what hangs in a command or a server holds up neither the run nor its end, and after
``kill -9`` of the orchestrator it sees the stream close without ``end``, and says so. Nothing is
kept: what a channel does not take after a few quick tries is not sent again.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from flows.notifying.channels import ChannelFailed, send
from flows.notifying.messages import Topic
from infra.host.processes import host_name, own_python
from infra.orchestrator.timeline import run_events
from infra.store.records import now_text
from infra.store.workspace import Workspace
from refiner_core.contract.config import NotifyConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.records import from_json, to_json
from refiner_core.contract.sections.steering import Alarm, alarms_of, check_notify
from refiner_core.report.printing import counted

NOT_TOLD = "not_told"
#: How long the end of a run waits for its last messages to go out.
CATCH_UP_S = 10.0
#: A job that Slurm starts again is ended whole: nobody is left to mourn then.
_MOURN_AFTER_S = 3.0


class Sender:
    """The orchestrator's side: hands messages over, and never waits, except in ``close``.

    Parameters
    ----------
    notify
        By which channels, and of what.
    began_at
        When the call was begun, for ``notify.after_min``.
    events
        The event log for what is not told.
    say
        Hears the same.
    """

    def __init__(
        self, notify: NotifyConfig, began_at: str, events: Path, say: Callable[[str], None]
    ) -> None:
        self._notify, self._events, self._say = notify, events, say
        began = datetime.fromisoformat(began_at) if began_at else None
        self._loud_at = (began.timestamp() if began else 0.0) + 60.0 * notify.after_min
        self._process: subprocess.Popen[str] | None = None

    @property
    def quiet(self) -> bool:
        """True if it is too early to tell anybody of anything."""
        return time.time() < self._loud_at

    def begin(self, gone: Mapping[str, Any]) -> None:
        """Start the process; ``gone`` is what it says should this one die."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flows.notifying.sender"],
                env={**own_python(), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a traceback may hold an address
                text=True,
                start_new_session=True,  # Ctrl-C in the terminal is for the orchestrator
            )
        except OSError as error:
            self._say(f"nobody will be told of this run: {error.strerror or error}")
            return
        alarms = [to_json(alarm) for alarm in alarms_of(self._notify)]
        last = (
            {"gone": dict(gone), "loud_at": self._loud_at}
            if gone["kind"] in self._notify.on
            else {}
        )
        self._write({"alarms": alarms, "events": str(self._events), **last})

    def tell(self, message: Mapping[str, Any]) -> None:
        """Have a message sent, if that is wanted."""
        if message["kind"] in self._notify.on and (message["kind"] == "paused" or not self.quiet):
            self._write({"message": dict(message)})

    def end(self) -> None:
        """No more comes."""
        self._write({"end": True})

    def close(self) -> None:
        """Wait a while until all has gone out; say what has not."""
        if (process := self._process) is None:
            return
        self.end()
        try:
            said, _ = process.communicate(timeout=CATCH_UP_S)
        except subprocess.TimeoutExpired:
            self._say(
                f"A message is still on its way; process {process.pid} goes on with it for up to "
                "two minutes, and `refiner status` says if it was in vain. The results are not "
                "affected."
            )
            return
        for line in said.splitlines():
            self._say(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdin.closed:
            return
        try:
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
        except OSError as error:
            self._say(f"nobody is told of this run any more, the sender is gone: {error.strerror}")
            self._process = None


# ---------------------------------------------------------------- in the process


def serve(stream: IO[str]) -> None:
    """Send what comes by a stream until it ends, by every channel in a thread of its own."""
    head = json.loads(stream.readline())
    threads = [(from_json(Alarm, a), ThreadPoolExecutor(1)) for a in head["alarms"]]

    def take(message: Mapping[str, Any]) -> None:
        for alarm, thread in threads:
            thread.submit(_send, alarm, message, Path(head["events"]))

    ended = False
    for line in stream:
        try:
            told = json.loads(line)
        except json.JSONDecodeError:  # the orchestrator was killed in the middle of it
            break
        if ended := "end" in told:
            break
        take(told["message"])
    if not ended and "gone" in head:
        time.sleep(_MOURN_AFTER_S)
        if time.time() >= head["loud_at"]:
            take(head["gone"])
    for _, thread in threads:
        thread.shutdown()


def _send(alarm: Alarm, message: Mapping[str, Any], events: Path) -> None:
    try:
        send(alarm, message, show=False)
        return
    except ChannelFailed as error:
        why = str(error)
    told = {"kind": message["kind"], "title": message["title"], "channel": alarm.name}
    # A full disk, and an orchestrator that has ended: nobody reads it.
    with contextlib.suppress(OSError), events.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"at": now_text(), "event": NOT_TOLD, **told, "why": why}) + "\n")
    with contextlib.suppress(OSError):
        sys.stdout.write(f"not told by {alarm.name}: {message['title']}: {why}\n")
        sys.stdout.flush()


# ---------------------------------------------------------------- by hand, and afterwards


def notify_settings(recipe: str, overrides: Sequence[str]) -> RecipeConfig:
    """A recipe of which at least the `notify` section can be carried out.

    Parameters
    ----------
    recipe, overrides
        As for ``refiner run``.

    Raises
    ------
    ConfigurationError
        It cannot, or names no channel.
    """
    config = load_recipe(recipe, overrides)
    check_notify(config.notify)
    if not alarms_of(config.notify):
        raise ConfigurationError(
            f"{recipe} tells nobody: it names no channel.",
            expected="notify.urls or notify.command",
            fix="add one, e.g. notify.urls=[MY_HOOK] after `export MY_HOOK=https://…`, or "
            "notify.command='cat >> ~/told.jsonl'",
        )
    return config


def try_channels(config: RecipeConfig, *, started: Callable[[str], None]) -> list[dict[str, Any]]:
    """Send a test message by every channel of ``config``, one after the other; ``started`` hears of
    each. A row for each channel: ``channel``, ``seconds``, ``delivered``, and ``why`` not. It
    raises nothing."""
    topic = Topic("test", config.recipe, str(Path(config.workspace).absolute()), host_name())
    told = ", ".join(config.notify.on) or "nothing: notify.on is empty"
    text = f"This is a test. What is told of runs of {config.recipe}: {told}."
    message = topic.message("test", "of the channels", text, "show notify")
    tried = []
    for alarm in alarms_of(config.notify):
        started(alarm.name)
        began, why = time.monotonic(), ""
        try:
            send(alarm, message)
        except ChannelFailed as error:
            why = str(error)
        seconds = round(time.monotonic() - began, 2)
        row = {"channel": alarm.name, "seconds": seconds, "why": why, "delivered": not why}
        tried.append(row)
    return tried


def not_told(workspace: Workspace, call: str) -> list[dict[str, Any]]:
    """When, of which kind, its title, by which channel, and why not; oldest first."""
    keys = ("at", "kind", "title", "channel", "why")
    events = (e for e in run_events(workspace, call) if e.get("event") == NOT_TOLD)
    return [{key: str(event.get(key, "")) for key in keys} for event in events]


def not_told_lines(workspace: Workspace, call: str) -> Iterator[str]:
    """For people: the last one, with what finds out why."""
    for event in (found := not_told(workspace, call))[-1:]:
        yield (
            f"not told: {counted(len(found), 'message')}, the last ({event['kind']}) by "
            f"{event['channel']}: {event['why']} (`refiner notify test` tries the channel)"
        )


if __name__ == "__main__":
    serve(sys.stdin)
