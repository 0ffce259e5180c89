"""Ways in which something goes out: a command, a webhook, an event in Prefect.

In: a :class:`Parcel`. Out: nothing, or :class:`ChannelFailed` with a reason that holds no secret.

A *command* is run by the shell, has the parcel's body as JSON on its standard input, and plain
fields in its environment. What it prints is shown or thrown away, and recorded nowhere: it may be a
secret. A *webhook* is a POST of the same JSON, with ``text`` as chat servers want it; its address
is in the environment. It is sent nowhere else: an answer that names another address is a failure.
An *event* goes to the Prefect server; an automation may act on it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.host.environment import environment
from infra.host.secrets import masked
from refiner_core.contract.alarms import Alarm
from refiner_core.contract.errors import RefinerError

_COMMAND_S, _POST_S, _EVENT_S = 120.0, 20.0, 120.0
_TRY = "try it with `refiner notify test RECIPE`"
_TRIES, _PAUSE_S = 3, 1.0
_LONGEST = 400


class ChannelFailed(RefinerError, RuntimeError):
    """A message did not go out; it is sent again later."""

    resumable = True


@dataclass(frozen=True)
class Parcel:
    """What goes out, in the forms that channels need.

    Attributes
    ----------
    body
        All of it, as JSON; has ``title`` and ``text``.
    variables
        Fields for a command's environment.
    event, labels
        Name of the event in Prefect, and the labels of its resource.
    """

    body: Mapping[str, Any]
    variables: Mapping[str, str]
    event: str
    labels: Mapping[str, str]


def send(alarm: Alarm, parcel: Parcel, *, show: bool = True) -> None:
    """Send something by one channel; ``show`` what a command prints on standard error.

    Raises
    ------
    ChannelFailed
        It did not get through.
    """
    if alarm.channel == "command":
        _command(alarm.what, parcel, show)
    elif alarm.channel == "webhook":
        _webhook(alarm.what, parcel)
    else:
        _event(parcel)


def webhook_address(variable: str) -> str:
    """The address in the environment; empty where there is none."""
    address = os.environ.get(variable, "").strip()
    return address if address.startswith(("http://", "https://")) else ""


def _command(command: str, parcel: Parcel, show: bool) -> None:
    output = sys.stderr if show else subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            command,
            shell=True,
            env={**environment(), **parcel.variables},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,  # so that what it has started ends with it
        )
        _at_work.add(process)
        try:
            process.communicate(json.dumps(dict(parcel.body)) + "\n", timeout=_COMMAND_S)
        except BaseException:
            _end(process)
            raise
        finally:
            _at_work.discard(process)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ChannelFailed(
            f"The command did not end: {type(error).__name__}",
            expected=f"its end within {_COMMAND_S:g} s",
            fix=_TRY,
        ) from error
    if process.returncode:
        raise ChannelFailed(
            f"The command ended with code {process.returncode}", expected="code 0", fix=_TRY
        )


#: Commands that have not ended yet: none outlives who has sent the message.
_at_work: set[subprocess.Popen[str]] = set()


@atexit.register
def _end_all() -> None:
    for process in list(_at_work):
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _NoOtherAddress(urllib.request.HTTPRedirectHandler):
    """A POST that is sent on becomes a GET without its body, and its success would mean nothing."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _without_address(error: OSError | ValueError) -> str:
    """Why nobody answered, in words that cannot hold the address."""
    inner = getattr(error, "reason", error)
    if isinstance(inner, socket.gaierror):
        return "its host's name is not known here"
    if isinstance(inner, TimeoutError):
        return f"no answer within {_POST_S:g} s"
    if isinstance(inner, OSError) and inner.errno and not isinstance(inner, ssl.SSLError):
        return os.strerror(inner.errno).lower()
    return type(inner if isinstance(inner, Exception) else error).__name__


def _webhook(variable: str, parcel: Parcel) -> None:
    address = webhook_address(variable)
    if not address:
        raise ChannelFailed(
            f"{variable} holds no address",
            expected="an http(s) address in the environment that the message is sent from",
            fix=f"export {variable}=…",
        )
    text = f"{parcel.body['title']}\n{parcel.body['text']}"
    body = json.dumps({**parcel.body, "text": text}).encode()
    opener = urllib.request.build_opener(_NoOtherAddress)
    reason = ""
    for number in range(_TRIES):
        if number:
            time.sleep(_PAUSE_S * number)
        try:
            request = urllib.request.Request(
                address, body, {"Content-Type": "application/json"}, method="POST"
            )
            with opener.open(request, timeout=_POST_S):
                return
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code}"
            if error.code < 500 and error.code not in (408, 429):
                break
        except (OSError, ValueError) as error:  # its words may hold the address
            reason = _without_address(error)
    # Without its cause: that may hold the address, too.
    raise ChannelFailed(
        f"The webhook in {variable} did not take the message ({reason})",
        expected="an address that answers a POST of JSON with 2xx",
        fix=f"correct the address in {variable}; {_TRY}",
    )


def _event(parcel: Parcel) -> None:
    """Prefect is imported by a process of its own: it reads its settings when it is imported."""
    from infra.prefect_server.server import passed_on, server_status

    status = server_status()
    if status.info is None:
        raise ChannelFailed(
            "No Prefect server runs here",
            expected="the one that a run without --no-server starts, or PREFECT_API_URL",
            fix="leave out --no-server, or start one of your own",
        )
    root = str(Path(__file__).resolve().parents[2])
    env = {**passed_on(environment()), **status.info.client_env()}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    told = {"event": parcel.event, "labels": parcel.labels, "payload": parcel.body}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "flows.notifying.event"],
            input=json.dumps(told),
            env=env,
            capture_output=True,
            text=True,
            timeout=_EVENT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChannelFailed(
            f"Prefect was not told: {type(error).__name__}",
            expected="its server to take events",
            fix="see `refiner server status`; the run is not held up by it",
        ) from error
    if done.returncode:
        words = masked((done.stderr.strip().splitlines() or [""])[-1])[:_LONGEST]
        raise ChannelFailed(
            f"Prefect did not take the event: {words}",
            expected="its server to take events",
            fix="see `refiner server status`; the run is not held up by it",
        )
