"""Channels for a message: a command, or addresses of Apprise.

In: a message as JSON, with ``title``, ``text`` and ``kind``. Out: nothing, or
:class:`ChannelError` with a reason that holds no secret.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.host.processes import environment
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.sections.steering import VARIABLE, NotifyChannel

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
