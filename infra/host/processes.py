"""Processes, and whether one is still the same one.

In: process numbers. Out: :class:`ProcessId` values that can be written down, read on any node and
asked later. A number alone is not enough (they are used again), so the start time goes with it;
start times are only ever compared with others of the same host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from dataclasses import dataclass

import psutil

log = logging.getLogger(__name__)

#: The kernel counts from boot and the boot time moves a little with the clock.
_START_TOLERANCE_S = 2.0


@dataclass(frozen=True)
class ProcessId:
    """One process, for good: ``host:pid:start time``."""

    host: str
    pid: int
    started: float

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}:{self.started:.2f}"

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        """The process that ``str`` wrote down.

        Raises
        ------
        ValueError
            That is not one.
        """
        host, pid, started = text.rsplit(":", 2)
        return cls(host, int(pid), float(started))

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessId:
        """A running process of this host; this one by default."""
        number = os.getpid() if pid is None else pid
        return cls(host_name(), number, psutil.Process(number).create_time())

    @property
    def here(self) -> bool:
        """Whether it is, or was, a process of this host, so that one can look."""
        return self.host == host_name()

    @property
    def alive(self) -> bool:
        """Whether the very same process still runs; False for one of another host."""
        if not self.here:
            return False
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

    def terminate(self) -> bool:
        """Ask it to stop (SIGTERM to this process alone, so that it can save). False if gone."""
        return self._send(signal.SIGTERM)

    def kill_group(self) -> None:
        """End it and all it has started, now."""
        if not self.alive:
            return
        group = os.getpgid(self.pid)
        if group != os.getpgid(0):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
            return
        # It was started by hand from our own shell: its group is ours too, so go by parentage.
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self._send(signal.SIGKILL)

    def wait_gone(self, timeout_s: float) -> bool:
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


def host_name() -> str:
    """The name that processes of this host carry."""
    return socket.gethostname()
