"""Ways in which a message goes out: a command, or addresses that Apprise knows.

In: a message as JSON, with ``title``, ``text`` and ``kind``. Out: nothing, or
:class:`ChannelFailed` with a reason that holds no secret.

A *command* is run by the shell, has the message as JSON on its standard input and its fields in its
environment. What it prints is shown or thrown away, and recorded nowhere: it may be a secret. An
*address* is read, when it is needed, from an environment variable or a file; one of http(s) that
Apprise does not know gets a POST of the same JSON. It is sent nowhere else: an answer that names
another address is a failure.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from infra.host.processes import environment
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.sections.steering import VARIABLE, Alarm

_COMMAND_S = 60.0
_TRIES, _PAUSE_S = 3, 1.0
_TRY = "try it with `refiner notify test RECIPE`"
#: What Apprise calls kinds of messages.
_TYPES = {"finished": "success", "failed": "failure", "paused": "warning"}
#: What Apprise adds to the JSON of a POST, and chat servers do not want.
_NOT_SENT = dict.fromkeys(("version", "attachments", "type"), "")


class ChannelFailed(RefinerError, RuntimeError):
    """A message did not go out."""

    resumable = True


def send(
    alarm: Alarm, message: Mapping[str, Any], *, prefix: str = "REFINER_", show: bool = True
) -> None:
    """Send a message by one channel.

    Parameters
    ----------
    prefix
        Of the variables in which a command finds the fields.
    show
        Show what a command prints on standard error.

    Raises
    ------
    ChannelFailed
        It did not get through.
    """
    if alarm.channel == "command":
        _command(alarm.what, message, prefix, show)
    else:
        _post(alarm.what, message)


def addresses(name: str) -> list[str]:
    """The addresses that a variable or a file holds, one a line; none where it cannot be read."""
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
            start_new_session=True,  # so that what it has started ends with it
        )
        try:
            process.communicate(json.dumps(dict(message)) + "\n", timeout=_COMMAND_S)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
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


def _post(name: str, message: Mapping[str, Any]) -> None:
    import apprise

    found = addresses(name)
    if not found:
        raise ChannelFailed(
            f"{name} holds no address",
            expected="one a line that Apprise knows, or one of http(s), where the message is sent",
            fix=f"export {name}=…" if VARIABLE.fullmatch(name) else f"write it into {name}",
        )
    asset = apprise.AppriseAsset(
        async_mode=False,
        http_redirects=False,
        default_service_retry=_TRIES - 1,
        default_service_wait=_PAUSE_S,
    )
    kind = apprise.NotifyType(_TYPES.get(str(message["kind"]), "info"))
    with _heard() as said:
        for number, address in enumerate(found, start=1):
            which = f"Address {number} in {name}" if len(found) > 1 else f"The address in {name}"
            service, is_plain = _service(address, message, asset)
            if service is None:
                raise ChannelFailed(
                    f"{which} is none that Apprise knows",
                    expected="such as https://…, slack://…, mailto://…, json://…",
                    fix=f"correct {name}; {_TRY}",
                )
            taker = apprise.Apprise(asset=asset)
            taker.add(service)
            text = str(message["text"])
            text = f"{message['title']}\n{text}" if is_plain else text
            if not taker.notify(body=text, title=str(message["title"]), notify_type=kind):
                codes = re.findall(r"\berror=(\d{3})\b", "\n".join(said))
                raise ChannelFailed(
                    f"{which} did not take the message"
                    f" ({f'HTTP {codes[-1]}' if codes else 'no answer'})",
                    expected="a server that does",
                    fix=f"correct {name}; {_TRY}",
                )


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """Words of Apprise in this thread; nobody else hears it, as an address may be in it."""
    said: list[str] = []
    here = threading.get_ident()

    def hear(record: logging.LogRecord) -> bool:
        if record.thread == here:
            said.append(record.getMessage())
        return record.thread != here

    logger = logging.getLogger("apprise")
    logger.addFilter(hear)
    try:
        yield said
    finally:
        logger.removeFilter(hear)


def _service(address: str, message: Mapping[str, Any], asset: Any) -> tuple[Any, bool]:
    """The service that takes a message by an address; True if it is a POST of the message's own
    JSON."""
    import apprise

    if (service := apprise.Apprise.instantiate(address, asset=asset)) is not None:
        return service, False
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return None, False
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None, False
    own = {k: v for k, v in message.items() if k not in ("title", "text", "version")}
    values = {
        "schema": "jsons" if parts.scheme == "https" else "json",
        **{"host": parts.hostname, "port": port, "fullpath": parts.path or "/"},
        **{"user": unquote(parts.username or ""), "password": unquote(parts.password or "")},
        "params": dict(parse_qsl(parts.query, keep_blank_values=True)),
        "payload": {**own, **_NOT_SENT, "message": "text"},
    }
    return apprise.Apprise.instantiate(values, asset=asset), True
