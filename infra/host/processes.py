"""Processes: this one's environment, the identity of a process, the holder of a port.

In: process numbers. Out: :class:`ProcessId` values that can be recorded, read on any node and
checked later. Numbers are reused, so the start time is added: in the kernel's ticks since a named
boot, which no step of the clock changes. Where the kernel does not give that (and in records of
older versions), it is a time of the clock.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import pwd
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import psutil

log = logging.getLogger(__name__)
#: For times of the clock: the kernel counts from boot, and the boot time drifts a little.
_START_TOLERANCE_S = 2.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE, _START_TICKS = 0, 19  # fields of /proc/PID/stat after the command's name
Holder = Literal["nobody", "ours", "another"]
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"


def collect_rarely() -> None:
    """Collect garbage rarely, and not at the exit: importing torch and transformers makes a million
    objects that stay, and looking through them takes a quarter of the seconds that it takes."""
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)


def environment() -> dict[str, str]:
    """A copy of all variables. ``{**os.environ}`` raises if another thread deletes one meanwhile,
    as submitting a job does with the settings of this process's own job."""
    known = ((name, os.environ.get(name)) for name in list(os.environ))
    return {name: value for name, value in known if value is not None}


def own_python() -> dict[str, str]:
    """All variables, for another Python process that imports the same refiner as this one."""
    root = str(Path(__file__).resolve().parents[2])
    given = environment()
    path = os.pathsep.join(filter(None, [root, given.get("PYTHONPATH", "")]))
    return {**given, "PYTHONPATH": path}


def start_apart(
    command: Sequence[str],
    output: IO[bytes],
    env: Mapping[str, str],
    pass_fds: Collection[int] = (),
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """A process in a session of its own, without a terminal: neither Ctrl-C nor the terminal's end
    reaches it."""
    return subprocess.Popen(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=pass_fds,
    )


def run_program(
    command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with empty input; its output, whatever its exit status.

    Raises
    ------
    OSError
        It is missing, or no process could be started.
    TimeoutExpired
        It did not end in time.
    """
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        env=env,
        check=False,
    )


@dataclass(frozen=True)
class ProcessId:
    """The unique identity of a process: ``host:pid:ticks@boot``, or ``host:pid:seconds``.

    Attributes
    ----------
    host, pid
        Its host, and its number there.
    started
        Ticks since ``boot``; without one, seconds since the epoch.
    boot
        The kernel's name for the boot that ``started`` counts from.
    """

    host: str
    pid: int
    started: float
    boot: str = ""

    def __str__(self) -> str:
        started = f"{self.started:.0f}@{self.boot}" if self.boot else f"{self.started:.2f}"
        return f"{self.host}:{self.pid}:{started}"

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        """The process from its text.

        Raises
        ------
        ValueError
            The text is not one.
        """
        host, pid, when = text.rsplit(":", 2)
        started, _, boot = when.partition("@")
        return cls(host, int(pid), float(started), boot)

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessId:
        """A running process of this host; this one by default."""
        number = os.getpid() if pid is None else pid
        boot, stat = _boot(), _stat(number)
        if boot and stat is not None:
            return cls(host_name(), number, float(stat[1]), boot)
        return cls(host_name(), number, psutil.Process(number).create_time())

    @property
    def here(self) -> bool:
        """True if it is, or was, a process of this host, which can be checked."""
        return self.host == host_name()

    @property
    def alive(self) -> bool:
        """True if the same process still runs; False for another host's."""
        if not self.here:
            return False
        if self.boot:
            return self._runs_since_boot()
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < _START_TOLERANCE_S
            return bool(same and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.ZombieProcess:
            return False
        except psutil.NoSuchProcess:
            return bool(psutil.pid_exists(self.pid))  # hidden by `hidepid`: another user's
        except psutil.AccessDenied:
            return True

    def _runs_since_boot(self) -> bool:
        if _boot() not in (self.boot, ""):
            return False
        try:
            stat = _stat(self.pid)
        except OSError as error:  # no permission, or no file can be opened: it is not gone
            log.debug("process %s cannot be checked: %s", self, error)
            return True
        if stat is None:
            return bool(psutil.pid_exists(self.pid))  # hidden by `hidepid`: another user's
        return stat[1] == int(self.started) and stat[0] not in "ZX"

    def terminate(self) -> bool:
        """Ask it to stop (SIGTERM to this process alone, so that it can save). False if gone."""
        return self._send(signal.SIGTERM)

    def kill_group(self) -> None:
        """End it and its children, now."""
        if not self.alive:
            return
        try:
            group = os.getpgid(self.pid)
            if group != os.getpgid(0):
                os.killpg(group, signal.SIGKILL)
                return
        except (ProcessLookupError, PermissionError):  # it has just ended, or is another user's
            return
        # It was started by hand from our own shell, in our group: use its descendants instead.
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self._send(signal.SIGKILL)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until it is gone; False if it is still there after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _send(self, number: signal.Signals) -> bool:
        if not self.alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            log.warning("process %s belongs to another user; it is left alone", self)
            return False
        return True


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start of a process from the kernel; None if it has no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may contain any character
    return fields[_STATE], int(fields[_START_TICKS])


def _boot() -> str:
    """The kernel's name for this boot; empty where it has none."""
    try:
        return _BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def host_name() -> str:
    """The host name in process ids."""
    return socket.gethostname()


def user_name() -> str:
    """The user's name for records; in a container a user may only have a number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"


def holder_of(port: int, top: int, *, by_daemon: bool = False) -> Holder:
    """The holder of a port: ``ours`` if all its listeners descend from process ``top``.

    ``by_daemon`` is for servers started by a container's daemon (docker): they do not descend from
    our processes, so it suffices that they belong to this user or root.
    """
    sockets = _listening(port)
    if not sockets:
        return "nobody"
    own = _open_in(_family(top))
    others = {uid for inode, uid in sockets.items() if inode not in own}
    return "ours" if not others or (by_daemon and others <= {0, os.getuid()}) else "another"


def _listening(port: int) -> dict[int, int]:
    """Sockets that listen at a port, on any address: their inodes, with owners."""
    found = {}
    for table in _TABLES:
        with suppress(FileNotFoundError):  # no IPv6
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                at = int(fields[1].rpartition(":")[2], 16)
                if (at, fields[3]) == (port, _LISTENS):
                    found[int(fields[9])] = int(fields[7])
    return found


def _family(top: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(top)
        return [process, *process.children(recursive=True)]
    return []


def _open_in(processes: list[psutil.Process]) -> set[int]:
    """Inodes of the open sockets of processes."""
    found = set()
    for process in processes:
        with suppress(OSError):  # it has ended
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    kind, _, number = str(entry.readlink()).partition(":[")
                    if kind == "socket":
                        found.add(int(number.rstrip("]")))
    return found


def listens(pid: int, port: int) -> bool:
    """True if a process itself listens at a port."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not _open_in([psutil.Process(pid)]).isdisjoint(_listening(port))
    return False


def free_port(host: str) -> int:
    """A port of an address without a listener at the moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def node_address() -> str:
    """An address of this machine for other nodes: that of its name, or of its default route."""
    with contextlib.suppress(OSError):
        for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET):
            address = str(found[4][0])
            if not address.startswith("127."):
                return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the system only chooses the route
        return str(probe.getsockname()[0])
    return "127.0.0.1"
