"""Sends messages from a process beside the orchestrator: ``python -m flows.notifying.sender``.

In: lines of JSON on standard input: the channels and the message for the orchestrator's death, then
one message per line, at last ``end``. Out: the messages through every channel; failures go to the
run's event log and standard output.

Why a process: a hanging command or server delays neither the run nor its end, and after ``kill -9``
of the orchestrator the stream closes without ``end``, which is then reported. Nothing is stored: a
message that a channel refuses after a few quick retries is not sent again.
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

from flows.notifying.channels import ChannelError, send
from flows.notifying.messages import Topic
from infra.host.processes import host_name, own_python
from infra.orchestrator.timeline import run_events
from infra.store.records import now_text
from infra.store.workspace import Workspace
from refiner_core.contract.config import NotifyConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.records import from_json, to_json
from refiner_core.contract.sections.steering import NotifyChannel, alarms_of, check_notify
from refiner_core.report.printing import counted

NOT_TOLD = "not_told"
#: Maximum wait for the last messages at the end of a run, seconds.
CATCH_UP_S = 10.0
#: Slurm kills a requeued job with all its processes: then no sender reports its end.
_LOST_AFTER_S = 3.0


class Sender:
    """The orchestrator's side: sends messages to the process, and never waits, except in ``close``.

    Parameters
    ----------
    notify
        Channels and selection of messages.
    began_at
        Start of the call, for ``notify.after_min``.
    events
        Event log for failures.
    print_line
        Receives failures.
    """

    def __init__(
        self, notify: NotifyConfig, began_at: str, events: Path, print_line: Callable[[str], None]
    ) -> None:
        self._notify, self._events, self._print_line = notify, events, print_line
        began = datetime.fromisoformat(began_at) if began_at else None
        self._loud_at = (began.timestamp() if began else 0.0) + 60.0 * notify.after_min
        self._process: subprocess.Popen[str] | None = None

    @property
    def quiet(self) -> bool:
        """True if it is too early for messages."""
        return time.time() < self._loud_at

    def begin(self, gone: Mapping[str, Any]) -> None:
        """Start the process; it sends ``gone`` if this one dies."""
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
            self._print_line(f"no messages will be sent about this run: {error.strerror or error}")
            return
        alarms = [to_json(alarm) for alarm in alarms_of(self._notify)]
        last = (
            {"gone": dict(gone), "loud_at": self._loud_at}
            if gone["kind"] in self._notify.on
            else {}
        )
        self._write({"alarms": alarms, "events": str(self._events), **last})

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message, if this kind is selected."""
        if message["kind"] in self._notify.on and (message["kind"] == "paused" or not self.quiet):
            self._write({"message": dict(message)})

    def end(self) -> None:
        """No further messages."""
        self._write({"end": True})

    def close(self) -> None:
        """Wait a while until all messages are sent; report the others."""
        if (process := self._process) is None:
            return
        self.end()
        try:
            said, _ = process.communicate(timeout=CATCH_UP_S)
        except subprocess.TimeoutExpired:
            self._print_line(
                f"A message is still on its way; process {process.pid} retries for up to "
                "two minutes, and `refiner status` shows a failure. The results are not "
                "affected."
            )
            return
        for line in said.splitlines():
            self._print_line(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdin.closed:
            return
        try:
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
        except OSError as error:
            self._print_line(
                f"no more messages about this run, the sender is gone: {error.strerror}"
            )
            self._process = None


# ---------------------------------------------------------------- in the process


def serve(stream: IO[str]) -> None:
    """Send the messages of a stream until it ends, through every channel in its own thread."""
    head = json.loads(stream.readline())
    threads = [(from_json(NotifyChannel, a), ThreadPoolExecutor(1)) for a in head["alarms"]]

    def take(message: Mapping[str, Any]) -> None:
        for alarm, thread in threads:
            thread.submit(_send, alarm, message, Path(head["events"]))

    ended = False
    for line in stream:
        try:
            told = json.loads(line)
        except json.JSONDecodeError:  # the orchestrator was killed while writing
            break
        if ended := "end" in told:
            break
        take(told["message"])
    if not ended and "gone" in head:
        time.sleep(_LOST_AFTER_S)
        if time.time() >= head["loud_at"]:
            take(head["gone"])
    for _, thread in threads:
        thread.shutdown()


def _send(alarm: NotifyChannel, message: Mapping[str, Any], events: Path) -> None:
    try:
        send(alarm, message, show=False)
        return
    except ChannelError as error:
        why = str(error)
    told = {"kind": message["kind"], "title": message["title"], "channel": alarm.name}
    # A full disk, and an orchestrator that has ended: there is no reader.
    with contextlib.suppress(OSError), events.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"at": now_text(), "event": NOT_TOLD, **told, "why": why}) + "\n")
    with contextlib.suppress(OSError):
        sys.stdout.write(f"not sent by {alarm.name}: {message['title']}: {why}\n")
        sys.stdout.flush()


# ---------------------------------------------------------------- tests and failures


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


def unsent(workspace: Workspace, call: str) -> list[dict[str, Any]]:
    """Failed messages, oldest first: time, kind, title, channel, and reason."""
    keys = ("at", "kind", "title", "channel", "why")
    events = (e for e in run_events(workspace, call) if e.get("event") == NOT_TOLD)
    return [{key: str(event.get(key, "")) for key in keys} for event in events]


def unsent_lines(workspace: Workspace, call: str) -> Iterator[str]:
    """Lines for people: the last failure, and the command that tests the channel."""
    for event in (found := unsent(workspace, call))[-1:]:
        yield (
            f"not sent: {counted(len(found), 'message')}, the last ({event['kind']}) by "
            f"{event['channel']}: {event['why']} (`refiner notify test` tries the channel)"
        )


if __name__ == "__main__":
    serve(sys.stdin)
