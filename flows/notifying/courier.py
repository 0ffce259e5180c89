"""Delivers messages: ``python -m flows.notifying.courier``, a process beside an orchestrator.

In: lines of JSON on standard input: a :class:`Route`, then a message each, at last ``end``. Out:
the messages by every channel, recorded as delivered or with why not, and tried again a few times.

Why a process: what hangs in a command or a server cannot hold up the run or its end; it may go on
for a while after the orchestrator has ended; and after ``kill -9`` of the orchestrator it sees the
stream close without ``end``, and says so. What an earlier courier of the same run has not delivered
is delivered first. A message that cannot be recorded (a full disk may be what it is about) goes out
all the same.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any

from flows.notifying.channels import ChannelFailed, send
from flows.notifying.message import Message, message_of, parcel_of
from flows.notifying.words import Topic, ended, gone
from infra.store.notices import Notices
from infra.store.orchestrators import orchestrator_of
from infra.store.workspace import Workspace
from refiner_core.contract.alarms import Alarm, alarms_of
from refiner_core.contract.config import NotifyConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.records import from_json, to_json

log = logging.getLogger(__name__)
#: Pauses between the tries of a message by a channel.
PAUSES_S = (5.0, 20.0, 60.0)
#: How long it goes on after the orchestrator has ended.
LINGER_S = 120.0
#: A job that Slurm starts again is ended whole: its courier then has nobody to mourn.
_MOURN_AFTER_S = 3.0
_AGAIN_S = 1.0  # another process sends the same


@dataclass(frozen=True)
class Route:
    """Whose messages go where.

    Attributes
    ----------
    topic
        The run or sweep.
    notify
        Which channels, and what is told of.
    turn
        Which of its orchestrators this one belongs to.
    orchestrator
        That process.
    began_at
        When the call was begun, for ``notify.after_min``.
    """

    topic: Topic
    notify: NotifyConfig
    turn: int
    orchestrator: str
    began_at: str


def route_line(route: Route) -> str:
    """The first line."""
    return json.dumps({"route": to_json(route)}) + "\n"


def recorded(message: Message, route: Route, *, quiet: bool) -> dict[str, Any]:
    """A message as it is recorded; one that is ``quiet`` is not sent."""
    channels = [alarm.name for alarm in alarms_of(route.notify)]
    return {**message.json(), "turn": route.turn, "quiet": quiet, "channels": channels}


def message_line(message: Message) -> str:
    """A line with a message."""
    return json.dumps({"message": message.json()}) + "\n"


END_LINE = json.dumps({"end": True}) + "\n"


class Courier:
    """Sends messages by every channel, each in a thread of its own.

    Parameters
    ----------
    route, notices
        Where they go, and where that is recorded.
    replaced
        Whether a later orchestrator has a courier of its own by now.
    """

    def __init__(
        self, route: Route, notices: Notices, replaced: Callable[[], bool] = lambda: False
    ) -> None:
        self._notices, self._replaced = notices, replaced
        self._messages: dict[str, Message] = {}
        self._sent: set[tuple[str, str]] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._deliver, args=(alarm,), name=alarm.name, daemon=True)
            for alarm in alarms_of(route.notify)
        ]

    def begin(self) -> None:
        """Take up what an earlier courier has left, and begin."""
        try:
            for value in self._notices.all():
                if not value.get("quiet"):
                    message = message_of(value)
                    self._messages[message.key] = message
        except RefinerError as error:
            log.warning("messages of before cannot be read: %s", error)
        for thread in self._threads:
            thread.start()

    def take(self, message: Message) -> None:
        """Deliver one more."""
        with self._changed:
            self._messages.setdefault(message.key, message)
            self._changed.notify_all()

    def finish(self, timeout_s: float) -> bool:
        """Nothing more comes. Wait until all is delivered or given up; whether that was in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # ------------------------------------------------------------ in a channel's thread

    def _deliver(self, alarm: Alarm) -> None:
        due: dict[str, tuple[int, float]] = {}  # key -> tries so far, when the next one is due
        while True:
            open_ = self._open(alarm, due)
            now = time.monotonic()
            ready = [key for key in open_ if due.get(key, (0, 0.0))[1] <= now]
            if not ready:
                with self._changed:
                    if self._closing and not open_:
                        return
                    self._changed.wait(_AGAIN_S if open_ else 60.0)
                continue
            key = ready[0]
            tries = due.get(key, (0, 0.0))[0]
            if not self._may_send(key, alarm):
                due[key] = (tries, now + _AGAIN_S)
            elif not self._send(alarm, key):
                pause_s = PAUSES_S[tries] if tries < len(PAUSES_S) else 0.0
                due[key] = (tries + 1, time.monotonic() + pause_s)

    def _open(self, alarm: Alarm, due: dict[str, tuple[int, float]]) -> list[str]:
        """What has not gone out by a channel, and is not given up, oldest first."""
        try:
            if self._replaced():
                return []
        except (OSError, RefinerError) as error:  # a workspace that cannot be read may come back
            log.warning("whether there is a later courier is not known: %s", error)
        with self._changed:
            keys = list(self._messages)
        return [
            key
            for key in keys
            if due.get(key, (0, 0.0))[0] <= len(PAUSES_S) and not self._is_delivered(key, alarm)
        ]

    def _is_delivered(self, key: str, alarm: Alarm) -> bool:
        return (key, alarm.name) in self._sent or self._notices.delivered(key, alarm.name)

    def _may_send(self, key: str, alarm: Alarm) -> bool:
        """Whether no other process sends it now, or just has; what cannot be noted is sent."""
        try:
            mine = self._notices.begin_sending(key, alarm.name)
            return mine and not self._is_delivered(key, alarm)
        except (OSError, RefinerError) as error:
            log.warning("who sends %s cannot be noted: %s", key, error)
            return True

    def _send(self, alarm: Alarm, key: str) -> bool:
        why = ""
        try:
            send(alarm, parcel_of(self._messages[key]), show=False)
        except ChannelFailed as error:
            why = str(error)
        except Exception as error:  # a channel's own bug must not keep the others' thread from it
            why = f"{type(error).__name__}"
        if not why:
            self._sent.add((key, alarm.name))
        try:
            self._notices.note_delivery(key, alarm.name, why)
        except (OSError, RefinerError) as error:
            log.warning("what became of %s cannot be noted: %s", key, error)
        return not why


def serve(stream: IO[str], *, mourn_after_s: float = _MOURN_AFTER_S) -> None:
    """Deliver what comes by a stream until it ends, and for a while after that."""
    route = from_json(Route, json.loads(stream.readline())["route"])
    workspace = Workspace.read_only(route.topic.workspace)
    call = route.topic.call
    notices = Notices(workspace.layout, workspace.layout.run(call).notices)
    courier = Courier(route, notices, lambda: workspace.newest_turn(call)[0] > route.turn)
    courier.begin()
    for line in stream:
        try:
            told = json.loads(line)
        except json.JSONDecodeError:  # the orchestrator was killed in the middle of it
            break
        if "end" in told:
            courier.finish(LINGER_S)
            return
        courier.take(message_of(told["message"]))
    time.sleep(mourn_after_s)
    if (last := _last_word(route, workspace, notices)) is not None:
        courier.take(last)
    courier.finish(LINGER_S)


def _last_word(route: Route, workspace: Workspace, notices: Notices) -> Message | None:
    """What is to be told when the orchestrator has left no word; recorded, if that can be."""
    who = orchestrator_of(workspace, route.topic.call)
    if who.turn != route.turn or who.standing not in ("gone", "ended"):
        return None
    if who.standing == "gone":
        message = gone(route.topic, f"gone-{route.turn}", route.orchestrator)
    else:
        if any(
            str(m["key"]).startswith(_ENDS) and m.get("turn") == route.turn for m in notices.all()
        ):
            return None
        message = ended(route.topic, f"ended-{route.turn}", int(who.exit_code or 0))
    quiet = age_s(route.began_at) < 60.0 * route.notify.after_min
    quiet = quiet or message.kind not in route.notify.on
    try:
        notices.record(message.key, recorded(message, route, quiet=quiet))
    except (OSError, RefinerError) as error:
        log.warning("that %s has ended cannot be noted: %s", route.topic.call, error)
    return None if quiet else message


def age_s(began_at: str) -> float:
    """Seconds since a moment, by this node's clock; long ago where nobody can say."""
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(began_at)).total_seconds()
    except (TypeError, ValueError):
        return float("inf")


#: How the keys of messages begin that say how a call has ended.
_ENDS = ("finished", "failed", "stopped", "broke")

if __name__ == "__main__":
    serve(sys.stdin)
