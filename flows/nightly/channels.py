"""Ways in which an alert goes out: a command, a webhook, an event in Prefect.

In: an alert as JSON. Out: nothing, or :class:`ChannelFailed` with a reason that holds no secret.

A *command* is run by the shell, has the alert on its standard input, and the plain fields in
``REFINER_ALERT_TITLE``, ``_TEXT``, ``_KIND``, ``_CAUSE``, ``_NIGHT``, ``_ID``; what it prints is
seen where the night is worked on, and recorded nowhere. A *webhook* is a POST of the same JSON,
with ``text`` as chat servers want it; its address is in the environment. An *event* is
``refiner.nightly.alert`` on ``refiner.nightly.NAME``; an automation may act on it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import RefinerError
from refiner_core.nightly.values import Alarm

#: Name of the event in Prefect.
ALERT = "refiner.nightly.alert"
_COMMAND_S, _POST_S, _EVENT_S = 120.0, 20.0, 120.0
_TRIES, _PAUSE_S = 3, 1.0
_LONGEST = 400


class ChannelFailed(RefinerError, RuntimeError):
    """An alert did not go out; it is sent again in the next night."""

    resumable = True


def send(alarm: Alarm, alert: Mapping[str, Any]) -> None:
    """Send an alert by one channel.

    Raises
    ------
    ChannelFailed
        It did not get through.
    """
    if alarm.channel == "command":
        _command(alarm.what, alert)
    elif alarm.channel == "webhook":
        _webhook(alarm.what, alert)
    else:
        _event(alert)


def _command(command: str, alert: Mapping[str, Any]) -> None:
    names = ("title", "text", "kind", "cause", "night", "id")
    env = {f"REFINER_ALERT_{n.upper()}": str(alert.get(n, "")) for n in names}
    try:
        done = subprocess.run(
            command,
            shell=True,
            input=json.dumps(alert),
            env={**os.environ, **env},
            stdout=sys.stderr,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChannelFailed(f"The alert's command did not end: {type(error).__name__}") from error
    if done.returncode:
        raise ChannelFailed(f"The alert's command ended with code {done.returncode}")


def _webhook(variable: str, alert: Mapping[str, Any]) -> None:
    address = os.environ.get(variable, "").strip()
    if not address.startswith(("http://", "https://")):
        raise ChannelFailed(
            f"{variable} holds no address",
            expected="an http(s) address in the environment of who works on the night",
            fix=f"export {variable}=…",
        )
    text = f"{alert['title']}\n{alert['text']}"
    body = json.dumps({**alert, "text": text}).encode()
    reason = ""
    for number in range(_TRIES):
        if number:
            time.sleep(_PAUSE_S * number)
        try:
            request = urllib.request.Request(
                address, body, {"Content-Type": "application/json"}, method="POST"
            )
            with urllib.request.urlopen(request, timeout=_POST_S):
                return
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code}"
            if error.code < 500 and error.code not in (408, 429):
                break
        except (OSError, ValueError) as error:  # its words may hold the address
            reason = type(error).__name__
    raise ChannelFailed(f"The webhook in {variable} did not take the alert ({reason})")


def _event(alert: Mapping[str, Any]) -> None:
    """Prefect is imported by a process of its own: it reads its settings when it is imported."""
    from infra.prefect_server.server import passed_on, server_status

    status = server_status()
    if status.info is None:
        raise ChannelFailed("No Prefect server runs here", fix="start one with `refiner server`")
    root = str(Path(__file__).resolve().parent.parent.parent)
    env = {**passed_on(os.environ), **status.info.client_env()}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "flows.nightly.event"],
            input=json.dumps(alert),
            env=env,
            capture_output=True,
            text=True,
            timeout=_EVENT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChannelFailed(f"Prefect was not told: {type(error).__name__}") from error
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [""])[-1][:_LONGEST]
        raise ChannelFailed(f"Prefect did not take the event: {words}")
