"""Sends messages from a process beside the orchestrator: ``python -m flows.notifying.sender``.

In: lines of JSON on standard input: the channels and the message for the orchestrator's death, then
one message per line, at last ``end``. Out: the messages through every channel; failures go to the
run's event log and standard output.

Why a process: a hanging command or server delays neither the run nor its end, and after ``kill -9``
of the orchestrator the stream closes without ``end``, which is then reported. Nothing is stored: a
message that a channel refuses after a few quick retries is not sent again.

A *command* is run by the shell, with the message as JSON on standard input and its fields in the
environment. Its output is shown or discarded, never recorded: it may be a secret. An *address* is
read, when needed, from an environment variable or a file; an http(s) address unknown to Apprise
gets a POST of the same JSON. Redirects are not followed: they are failures.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from infra.host.processes import environment, own_python
from infra.orchestrator.timeline import run_events
from infra.store.records import now_text
from infra.store.workspace import Workspace
from refiner_core.contract.config import NotifyConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.records import from_json, to_json
from refiner_core.contract.sections.steering import VARIABLE, NotifyChannel, alarms_of
from refiner_core.report.printing import counted

_COMMAND_S = 60.0
_ANSWER_S, _TRIES, _PAUSE_S = 10.0, 3, 1.0
_TRY = "try it with `refiner notify test RECIPE`"
#: Apprise's names of the kinds of messages.
_TYPES = {"finished": "success", "failed": "failure", "paused": "warning"}


class ChannelError(RefinerError, RuntimeError):
    """A message was not sent."""

    resumable = True


def send(
    alarm: NotifyChannel, message: Mapping[str, Any], *, prefix: str = "REFINER_", show: bool = True
) -> None:
    """Send a message through one channel.

    Parameters
    ----------
    prefix
        Prefix of the environment variables with the fields.
    show
        Show the command's output on standard error.

    Raises
    ------
    ChannelError
        The message was not accepted.
    """
    if alarm.channel == "command":
        _command(alarm.what, message, prefix, show)
        return
    try:
        _post(alarm.what, message)
    except ChannelError:
        raise
    except Exception as error:
        # A bug in the plugin of a service; its message and traceback may hold the address.
        raise ChannelError(
            f"{alarm.what} failed ({type(error).__name__})",
            expected="a service that Apprise can talk to",
            fix=_TRY,
        ) from None


def addresses(name: str) -> list[str]:
    """Addresses in a variable or a file, one per line; none if it cannot be read."""
    if VARIABLE.fullmatch(name):
        text = os.environ.get(name, "")
    else:
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8", errors="replace")
        except (OSError, RuntimeError):
            return []
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _command(command: str, message: Mapping[str, Any], prefix: str, show: bool) -> None:
    output = sys.stderr if show else subprocess.DEVNULL
    fields = {prefix + n.upper(): str(v) for n, v in message.items() if isinstance(v, str)}
    try:
        process = subprocess.Popen(
            command,
            shell=True,
            env={**environment(), **fields},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,  # so that its children end with it
        )
        try:
            process.communicate(json.dumps(dict(message)) + "\n", timeout=_COMMAND_S)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ChannelError(
            f"The command did not end: {type(error).__name__}",
            expected=f"its end within {_COMMAND_S:g} s",
            fix=_TRY,
        ) from error
    if process.returncode:
        raise ChannelError(
            f"The command ended with code {process.returncode}", expected="code 0", fix=_TRY
        )


def _post(name: str, message: Mapping[str, Any]) -> None:
    found = addresses(name)
    if not found:
        raise ChannelError(
            f"{name} holds no address",
            expected="one per line: an address of Apprise, or an http(s) URL for the message",
            fix=f"export {name}=…" if VARIABLE.fullmatch(name) else f"write it into {name}",
        )
    for number, address in enumerate(found, start=1):
        for tries in range(_TRIES):
            time.sleep(_PAUSE_S * bool(tries))
            if not (why := _refusal(address, message)):
                break
        else:
            raise ChannelError(
                f"Address {number} in {name} {why}",
                expected="a server that accepts it, such as https://…, slack://…, mailto://…",
                fix=f"correct {name}; {_TRY}",
            )


def _refusal(address: str, message: Mapping[str, Any]) -> str:
    """Reason why an address did not accept a message, without the address; empty if it did."""
    import apprise
    import httpx

    for name in ("apprise", "httpx"):  # their log may contain an address
        logging.getLogger(name).disabled = True
    asset = apprise.AppriseAsset(async_mode=False, http_redirects=False)
    service = apprise.Apprise.instantiate(address, asset=asset)
    if service is not None:
        taker = apprise.Apprise(asset=asset)
        taker.add(service)
        kind = apprise.NotifyType(_TYPES.get(str(message["kind"]), "info"))
        taken = taker.notify(body=message["text"], title=message["title"], notify_type=kind)
        return "" if taken else "did not take the message"
    own = {k: v for k, v in message.items() if k != "version"}
    own["text"] = f"{message['title']}\n{message['text']}"
    try:
        answer = httpx.post(address, json=own, timeout=_ANSWER_S)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.LocalProtocolError):
        return "is not known to Apprise"
    except httpx.HTTPError:
        return "did not take the message (no answer)"
    return "" if answer.is_success else f"did not take the message (HTTP {answer.status_code})"


# ---------------------------------------------------------------- channels


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
