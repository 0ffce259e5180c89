"""A server as a process of ours, and what its end means.

In: a shell text and an environment. Out: its lines (also to this process's output, without its
key), whether it runs, and why it ended.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from infra.host.listeners import holder_of
from infra.host.processes import ProcessId
from infra.host.secrets import MASK
from infra.jobs.failures import class_of_text
from infra.process.child import ChildProcess
from refiner_core.contract.errors import ConfigurationError, KilledError, StageFailed

log = logging.getLogger(__name__)

_TAIL_LINES = 400
#: How long a server gets to end by itself.
GRACE_S = 15.0
_NOT_FOUND, _NOT_RUNNABLE = 127, 126
_PORT_TAKEN = re.compile(r"(?i)address already in use|errno 98\b|eaddrinuse")
#: What an engine says of arguments and models that another try would not mend.
_MISTAKE = re.compile(
    r"(?i)unrecognized arguments?|invalid choice|no such option|error: argument|"
    r"repositorynotfound|is not a valid model identifier|not a local folder|"
    r"no such file or directory|modulenotfounderror|importerror|"
    r"offlinemodeisenabled|localentrynotfound|cannot find the requested files"
)
_ERROR_LINE = re.compile(r"(?:^|[\s(])(?:[\w.]*(?:Error|Exception)\b(?:\(|:|$)|error:|ERROR:?\s)")
#: Lines that only say that there was an error.
_NO_CAUSE = re.compile(
    r"Traceback|root cause above|Engine core initialization failed|EngineDeadError|raise \w+Error"
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Words:
    """What a server is called in messages, and what its user can change.

    ``not_found`` and ``mistake`` are what mends a command that is not there and arguments or a
    model that the engine does not take; ``container`` is the field that names a container.
    """

    name: str
    not_found: str
    mistake: str
    container: str


class PortTaken(KilledError):
    """Somebody else was faster to listen there."""


class ServerProcess:
    """A started server, or none yet.

    Parameters
    ----------
    words
        For messages.
    key
        A secret that its output is shown without.
    prefix
        Put before each line of its output.
    log_file
        Where its output is, for messages.
    by_daemon
        Whether a container's daemon may be who starts it.
    """

    def __init__(
        self,
        words: Words,
        *,
        key: str = "",
        prefix: str = "",
        log_file: str = "",
        by_daemon: bool = False,
    ) -> None:
        self.words, self._key, self._prefix, self._log_file = words, key, prefix, log_file
        self._by_daemon = by_daemon
        self._child: ChildProcess | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    @property
    def code(self) -> int | None:
        """Exit code, 128 + number for a signal; None while it runs."""
        return None if self._child is None else self._child.code

    @property
    def process(self) -> ProcessId | None:
        """The process that minds it, as long as there is one."""
        return ProcessId.of(self._child.pid) if self.code is None and self._child else None

    def launch(self, text: str, environment: Mapping[str, str], *, bash: bool) -> None:
        """Start it; ``bash`` where lines are for that shell, whose functions (`module`) a cluster's
        shells hand on."""
        log.info("starting the server:\n%s", text)
        self._tail.clear()
        shell = f"exec bash -c {shlex.quote(text)}" if bash else text
        self._child = ChildProcess(shell, environment, self._read)

    def listens_at(self, port: int) -> bool:
        """Whether it listens there; to be asked before it is sent its key.

        Raises
        ------
        PortTaken
            Somebody else does.
        """
        if self._child is None:
            return False
        holder = holder_of(port, self._child.pid, by_daemon=self._by_daemon)
        if holder == "another":
            raise PortTaken(
                f"Port {port} was given to {self.words.name.lower()}, and a process that it has "
                "not started listens there",
                expected="that nobody takes a port between two looks",
                fix=f"run the same command again; if a container's daemon starts the server, set "
                f"{self.words.container}",
            )
        return holder == "ours"

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End it: SIGTERM to all its processes, time to end, then SIGKILL."""
        if self._child is not None:
            self._child.end(grace_s)
            self._child.wait_read()

    def last_word(self) -> str:
        """The line of its output that names an error, or the last one."""
        return error_line(list(self._tail))

    def where(self) -> str:
        """A sentence that says where its output is."""
        return f" All that it has printed: {self._log_file}." if self._log_file else ""

    def ended(self, when: str) -> Exception:
        """What its end means: its last words, classed by what they speak of."""
        code = self.code
        if self._child is not None:
            self._child.wait_read()
        lines = list(self._tail)
        text = "\n".join(lines)
        if when.startswith("before") and _PORT_TAKEN.search(text):
            return PortTaken(
                f"Port taken: {error_line(lines)}",
                expected="a port that nobody listens on",
                fix="nothing; another one is tried",
            )
        said = error_line(lines)
        how = (
            f"exit code {code}"
            if code is not None and code < 128
            else f"signal {(code or 0) - 128}"
        )
        what = f"{self.words.name} ended {when} ({how}): {said}.{self.where()}"
        if code in (_NOT_FOUND, _NOT_RUNNABLE) and when.startswith("before"):
            return ConfigurationError(
                what,
                expected="a command that can be run where the server is started",
                fix=self.words.not_found,
            )
        if class_of_text(said) is not None:
            # Memory, a GPU, a full disk: told by these words, so what is added names none of them.
            return StageFailed(
                what,
                expected="a server that lasts",
                fix="mend what its words name; then run the same command again",
            )
        if when.startswith("before") and _MISTAKE.search(said):
            return ConfigurationError(
                what,
                expected="arguments and a model that the engine knows, with its weights on this "
                "machine or in the Hub's cache",
                fix=self.words.mistake,
            )
        if when.startswith("before") and code is not None and code < 128:
            return StageFailed(
                what,
                expected="an answer before its end",
                fix="see what it has printed, mend that, and run the same command again",
            )
        return KilledError(what, fix="nothing; another one is started")

    def _read(self, output: IO[bytes]) -> None:
        for raw in output:
            line = _COLOURS.sub("", raw.decode(errors="replace")).rstrip()
            if self._key:
                line = line.replace(self._key, MASK)
            self._tail.append(line)
            with contextlib.suppress(OSError):  # a log on a full disk must not stop the server
                print(f"{self._prefix}{line}", flush=True)


def error_line(lines: list[str]) -> str:
    """The line of a log that names the error: the last that looks like one, or the last at all."""
    kept = [line.strip() for line in lines if line.strip()]
    errors = [line for line in kept if _ERROR_LINE.search(line) and not _NO_CAUSE.search(line)]
    found = (errors or kept or ["(it printed nothing)"])[-1]
    return found[:400].rstrip(". ")


def free_port(host: str) -> int:
    """A port that nobody listens on at the moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
