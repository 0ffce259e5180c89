"""A server as a child process: its command, its readiness, and the meaning of its end.

In: the judge's configuration, the address to listen at, the place of its weights. Out: the shell
text and the environment; its lines (also to this process's output, without its key), whether it
runs, and why it ended. A key is only in the environment, because command lines can be read by
everyone on a node.
"""

from __future__ import annotations

import abc
import contextlib
import http.client
import json
import logging
import os
import posixpath
import re
import shlex
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from infra.external.process import CANNOT_START, fill, without_ours
from infra.host.processes import ProcessId, free_port, holder_of
from infra.host.secrets import MASK
from infra.jobs.failures import class_of_text
from infra.process.child import MARK, ChildProcess
from refiner_core.contract.config import JudgeConfig, RolloutServerConfig, ServeConfig
from refiner_core.contract.errors import (
    ConfigurationError,
    Interrupted,
    KilledError,
    RefinerError,
    StageFailed,
)
from refiner_core.contract.services import engine_of
from refiner_core.contract.types import Endpoint

#: Variables that carry the key to a server, by engine.
KEY_VARIABLES = {"vllm": "VLLM_API_KEY", "command": "REFINER_SERVER_KEY"}
#: A reply restricted to a schema may otherwise begin with endless blanks, up to its limit.
_COMPACT_JSON = '{"backend": "xgrammar", "disable_any_whitespace": true}'
#: Enables routes of vLLM that change weights; never set for a judge.
_NEVER = ("VLLM_SERVER_DEV_MODE", *KEY_VARIABLES.values())
log = logging.getLogger(__name__)
_TAIL_LINES = 400
_POLL_S, _TELL_EVERY_S = 0.1, 1.0
_PORTS_TRIED = 5
#: Grace period of a server, seconds.
GRACE_S = 15.0
_PORT_TAKEN = re.compile(r"(?i)address already in use|errno 98\b|eaddrinuse")
#: Messages of engines about arguments and models that a retry does not fix.
_MISTAKE = re.compile(
    r"(?i)unrecognized arguments?|invalid choice|no such option|error: argument|"
    r"repositorynotfound|is not a valid model identifier|not a local folder|"
    r"no such file or directory|modulenotfounderror|importerror|"
    r"offlinemodeisenabled|localentrynotfound|cannot find the requested files"
)
_ERROR_LINE = re.compile(r"(?:^|[\s(])(?:[\w.]*(?:Error|Exception)\b(?:\(|:|$)|error:|ERROR:?\s)")
#: Lines without the cause of an error.
_NO_CAUSE = re.compile(
    r"Traceback|root cause above|Engine core initialization failed|EngineDeadError|raise \w+Error"
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class ServerProgram(NamedTuple):
    """Program that serves models. ``field`` is its section of the recipe."""

    config: RolloutServerConfig | ServeConfig
    field: str
    engine: str

    @property
    def lacking(self) -> str:
        """Message about a program that is certainly missing; empty if none is."""
        words = shlex.split(self.config.container or "")
        name = words[0] if words else self.config.python or self.engine
        if shutil.which(name) or (self.config.setup and (words or "/" not in name)):
            return ""
        return f"there is no program `{name}` (neither ~ nor $NAME is replaced)"


def shell_text(program: RolloutServerConfig | ServeConfig, call: str) -> str:
    """The shell text of a program (run by ``exec``, so that signals reach it)."""
    words = [part for part in ((program.container or "").strip(), call.strip()) if part]
    return "\n".join(["set -e", *program.setup, f"exec {' '.join(words)}"])


def vllm_words(python: str | None) -> list[str]:
    """The words of vLLM's command line for serving."""
    return [*([python, "-m", "vllm.entrypoints.cli.main"] if python else ["vllm"]), "serve"]


def split_words(args: Sequence[str]) -> list[str]:
    """The words of entries with one or several of them: `--tensor-parallel-size 2`."""
    return [word for arg in args for word in shlex.split(arg)]


@dataclass(frozen=True)
class ListenAddress:
    """Address at which a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The base of the API, without a trailing slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    @property
    def options(self) -> list[str]:
        """Host and port, as options of most servers."""
        return ["--host", self.host, "--port", str(self.port)]


def server_text(judge: JudgeConfig, at: ListenAddress, weights: str | None = None) -> str:
    """The shell text of a judge's server.

    Parameters
    ----------
    judge
        Its ``serve``, ``serve_command``, ``model`` and ``revision``.
    at
        Where to listen.
    weights
        Folder or Hub id behind ``judge.model``, if that is another name.

    Raises
    ------
    ConfigurationError
        The engine cannot serve that model under its name.
    """
    engine, source, args = engine_of(judge), weights or judge.model, split_words(judge.serve.args)
    if engine == "vllm":
        words = _vllm(judge, at, source, args)
    elif engine == "transformers":
        words = _transformers(judge, at)
    else:
        listen = {"host": at.host, "port": str(at.port)}
        given = {"model": source, "revision": judge.revision or "", **listen}
        quoted = {name: shlex.quote(value) for name, value in given.items()}
        command = fill(" ".join((judge.serve_command or "").split()), quoted)
        return shell_text(judge.serve, f"{command} {shlex.join(args)}")
    return shell_text(judge.serve, shlex.join([*words, *args]))


def _vllm(judge: JudgeConfig, at: ListenAddress, source: str, args: Sequence[str]) -> list[str]:
    words = [*vllm_words(judge.serve.python), source]
    words += ["--revision", judge.revision] if judge.revision else []
    words += [*at.options, "--served-model-name", judge.model]
    # Else a model's own generation_config.json overrides the defaults of requests.
    words += ["--generation-config", "vllm"]
    if not any(arg.startswith("--structured-outputs-config") for arg in args):
        words += ["--structured-outputs-config", _COMPACT_JSON]
    return words


def _transformers(judge: JudgeConfig, at: ListenAddress) -> list[str]:
    """It serves the model under the name of its command line, so that is ``judge.model``."""
    if judge.revision not in (None, "main"):
        raise ConfigurationError(
            f"`transformers serve` has no option for the revision ({judge.revision!r}).",
            expected="the revision in the model's name",
            fix=f"set judge.model={judge.model}@{judge.revision} and omit judge.revision",
        )
    python = judge.serve.python
    words = [python, "-P", "-m", "transformers.cli.transformers"] if python else ["transformers"]
    return [*words, "serve", judge.model, *at.options]


def server_environment(
    engine: str, key: str, mark: str, given: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a server: the user's own, with the key in the engine's variable.

    All processes of the server inherit ``mark``, so that its leftovers can be found.
    """
    kept = without_ours(given)
    kept = {name: value for name, value in kept.items() if name not in _NEVER}
    kept |= {"PYTHONUNBUFFERED": "1", MARK: mark}
    if key and engine in KEY_VARIABLES:
        kept[KEY_VARIABLES[engine]] = key
    return kept


class NotReady(Exception):
    """It does not answer (yet)."""


class _PortTaken(KilledError):
    """Another process was faster to listen there."""


@dataclass(eq=False, kw_only=True)
class ServerProcess(abc.ABC):
    """A server, started or not; subclasses define it.

    Attributes
    ----------
    name, section
        Name in messages; and its section of the recipe.
    key
        Its key: a secret that is removed from its output.
    host
        Where it listens: a name or an address of this machine.
    prefix
        Put before each line of its output.
    log
        Where its output is, for messages.
    should_stop, tell
        Whether this process was asked to end, during a wait; receives the seconds of the wait.
    """

    section: ClassVar[str]
    name: str
    key: str = field(default="", repr=False)
    host: str = "127.0.0.1"
    prefix: str = ""
    log: str = ""
    should_stop: Callable[[], bool] = lambda: False
    tell: Callable[[float], None] = lambda seconds: None

    def __post_init__(self) -> None:
        self._child: ChildProcess | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.at = ListenAddress(self.host, 0)

    @property
    @abc.abstractmethod
    def settings(self) -> ServeConfig | RolloutServerConfig:
        """Its section of the recipe."""

    @property
    def by_daemon(self) -> bool:
        """True if a container's daemon may start it."""
        return bool(self.settings.container)

    @abc.abstractmethod
    def command(self) -> tuple[str, Mapping[str, str]]:
        """The shell text and the environment of a server at :attr:`at`."""

    @abc.abstractmethod
    def check(self) -> None:
        """Check whether it is ready.

        Raises
        ------
        NotReady
            Not yet.
        """

    @property
    def endpoint(self) -> Endpoint:
        """Its address."""
        return Endpoint(self.at.url, self.key)

    @property
    def code(self) -> int | None:
        """Exit code, 128 + number for a signal; None while it runs."""
        return None if self._child is None else self._child.code

    @property
    def process(self) -> ProcessId | None:
        """Its watchdog, while there is one."""
        return ProcessId.of(self._child.pid) if self.code is None and self._child else None

    def launch(self, text: str, environment: Mapping[str, str]) -> None:
        """Start it; with setup lines by bash, since clusters export functions (`module`) to it."""
        log.info("starting the server:\n%s", text)
        self._tail.clear()
        shell = f"exec bash -c {shlex.quote(text)}" if self.settings.setup else text
        self._child = ChildProcess(shell, environment, self._read)

    def start(self) -> None:
        """Start it and wait until it answers; on another port if that is taken meanwhile.

        Raises
        ------
        KilledError, StageFailed, ConfigurationError
            It ended, or did not answer in time.
        Interrupted
            This process was asked to end.
        """
        tries = 0
        while True:
            self.at, tries = ListenAddress(self.host, free_port(self.host)), tries + 1
            self.launch(*self.command())
            try:
                self._wait_until_ready()
                return
            except BaseException as error:
                self.stop(0.0)
                if not isinstance(error, _PortTaken) or tries == _PORTS_TRIED:
                    raise
                log.warning("%s; trying another one", error.what)

    def _wait_until_ready(self) -> None:
        began = reported = time.monotonic()
        limit_s = self.settings.start_timeout_s
        while self.code is None:
            try:
                self.check_port()
                self.check()
                log.info("it answers at %s", self.at.url)
                return
            except NotReady as error:
                why = f" ({error})" if str(error) else ""
            now = time.monotonic()
            if self.should_stop():
                what = f"{self.name} was asked to end before it answered"
                raise Interrupted(what, fix="run the same command again; what is saved is kept")
            if now - began > limit_s:
                raise StageFailed(
                    f"{self.name} has not answered within {limit_s:g} s{why}. Its last line: "
                    f"{self.last_word()}{self.where()}",
                    expected="an answer by then",
                    fix=f"increase {self.section}.start_timeout_s, or see what it waits for",
                )
            if now - reported >= _TELL_EVERY_S:
                reported = now
                self.tell(now - began)
            time.sleep(_POLL_S)
        raise self.ended("before it answered")

    def check_port(self) -> None:
        """Check that it listens there, before its key is sent.

        Raises
        ------
        NotReady
            It does not, yet.
        _PortTaken
            Another process does.
        """
        holder = "nobody"
        if self._child is not None:
            holder = holder_of(self.at.port, self._child.pid, by_daemon=self.by_daemon)
        if holder == "another":
            raise _PortTaken(
                f"Port {self.at.port} was given to {self.name.lower()}, but another process "
                "listens there",
                expected="a port that no other process takes meanwhile",
                fix=f"run the same command again; if a container's daemon starts the server, set "
                f"{self.section}.container",
            )
        if holder == "nobody":
            raise NotReady(f"it does not listen at {self.at.url}")

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End it: SIGTERM to all its processes, a grace period, then SIGKILL."""
        if self._child is not None:
            self._child.end(grace_s)
            self._child.wait_read()

    def last_word(self) -> str:
        """The line of its output that names an error, or the last one."""
        return error_line(list(self._tail))

    def where(self) -> str:
        """A sentence about the place of its output."""
        return f". Its full output: {self.log}." if self.log else ""

    def ended(self, when: str) -> Exception:
        """The error for its end, classified by its last lines."""
        code, early = self.code or 0, when.startswith("before")
        if self._child is not None:
            self._child.wait_read()
        said = self.last_word()
        if early and _PORT_TAKEN.search("\n".join(self._tail)):
            return _PortTaken(
                f"Port taken: {said}",
                expected="a port that no process listens on",
                fix="nothing; another one is tried",
            )
        kind: type[RefinerError]
        how = f"exit code {code}" if code < 128 else f"signal {code - 128}"
        what = f"{self.name} ended {when} ({how}): {said}{self.where() or '.'}"
        kind, expected, fix = KilledError, "", "nothing; another one is started"
        if class_of_text(said) is not None and not (early and code in CANNOT_START):
            # Memory, a GPU, a full disk: classified by these words, so the rest names none of them.
            kind, expected = StageFailed, "a server that keeps running"
            fix = "correct what its words name; then run the same command again"
        elif early and (code in CANNOT_START or _MISTAKE.search(said)):
            kind, fix = ConfigurationError, f"correct {self.section}: python, setup or args"
            expected = "an existing command, arguments and model, with its weights on "
            expected += "this machine or in the Hub's cache"
        elif early and code < 128:
            kind, expected = StageFailed, "an answer before its end"
            fix = "read its output, fix the cause, and run the same command again"
        return kind(what, expected=expected, fix=fix)

    def _read(self, output: IO[bytes]) -> None:
        for raw in output:
            line = _COLOURS.sub("", raw.decode(errors="replace")).rstrip()
            if self.key:
                line = line.replace(self.key, MASK)
            self._tail.append(line)
            with contextlib.suppress(OSError):  # a log on a full disk must not stop the server
                print(f"{self.prefix}{line}", flush=True)


def error_line(lines: list[str]) -> str:
    """The line of a log that names the error: the last that looks like one, or the last of all."""
    kept = [line.strip() for line in lines if line.strip()]
    errors = [line for line in kept if _ERROR_LINE.search(line) and not _NO_CAUSE.search(line)]
    found = (errors or kept or ["(it printed nothing)"])[-1]
    return found[:400].rstrip(". ")


def ask_server(
    endpoint: Endpoint, path: str, timeout_s: float, body: dict[str, Any] | None = None
) -> tuple[int, bytes]:
    """Status and body of an answer. No proxies, no redirects: the key is for this server alone.

    Raises
    ------
    NotReady
        There was none.
    """
    parts = urlsplit(endpoint.url)
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    data = None if body is None else json.dumps(body)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        route = posixpath.normpath(parts.path + path)
        connection.request("GET" if body is None else "POST", route, data, headers)
        response = connection.getresponse()
        return response.status, response.read(1 << 20)
    except (OSError, http.client.HTTPException) as error:
        raise NotReady(f"no answer from {endpoint.url}: {error or type(error).__name__}") from error
    finally:
        connection.close()
