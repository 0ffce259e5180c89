"""The page of a sweep while it runs: made again now and then, by a process of its own.

In: a workspace and a sweep that somebody works on. Out: the report's files, as `refiner report
SWEEP` writes them, kept fresh without anybody asking. Who works on the sweep calls
:meth:`LivePage.tick` in its rounds and :meth:`LivePage.end` when nothing more will happen, which
waits for the last report. Making one may take a while, so it is made at low priority, and no more
often than that it takes a tenth of the time. Why one could not be made stands in ``page.log``
beside it; it never disturbs the sweep.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

from infra.host.processes import own_python, start_apart
from infra.store.workspace import Workspace

#: Seconds between two reports, and how much longer than one takes that has to be.
EVERY_S = 30.0
PAUSE = 9.0


class LivePage:
    """Keeps the page of one sweep fresh, in the folder of its report."""

    def __init__(self, workspace: Workspace, sweep: str) -> None:
        self.folder = workspace.layout.reports / sweep
        words = ("-P", "-m", "flows.cli.main", "report", sweep, f"workspace={workspace.root}")
        self._command = ["nice", sys.executable, *words]
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._due: float | None = None

    def tick(self) -> None:
        """Begin to make a report, if one is due and none is being made."""
        now = time.monotonic()
        if self._process is not None and self._process.poll() is None:
            self._due = now + max(EVERY_S, PAUSE * (now - self._began))
        elif self._due is None:
            self._due = now + EVERY_S / 3
        elif now >= self._due:
            self._make()

    def end(self, timeout_s: float = 60.0) -> None:
        """Make the last report, of how it has all ended, and wait for it at most ``timeout_s``.
        Where nothing was ever at work (no :meth:`tick`), the report that there is still holds."""
        if self._due is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(timeout_s)  # one that has begun says that the sweep still runs
            self._make()
            if self._process is not None:
                self._process.wait(timeout_s)

    def close(self) -> None:
        """End a report that is being made; the newest complete one stays."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _make(self) -> None:
        self._began, self._due = time.monotonic(), time.monotonic() + EVERY_S
        with contextlib.suppress(OSError):  # a full disk
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "page.log").open("wb") as output:
                env = {**own_python(), "OMP_NUM_THREADS": "1"}
                self._process = start_apart(self._command, output, env)
