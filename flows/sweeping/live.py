"""The page of a sweep while it runs: made again now and then, by a process of its own.

In: a workspace and a sweep that somebody works on. Out: the report's files, kept fresh without
anybody asking. Who works on the sweep calls :meth:`LivePage.tick` in its rounds and
:meth:`LivePage.end` when nothing more will happen, which waits for the last report. Making one may
take a while, so it is made in another process, with low priority, and no more often than that it
takes a tenth of the time. Why one could not be made stands in ``page.log`` beside it; it never
disturbs the sweep.

    python -m flows.sweeping.live WORKSPACE SWEEP      makes it once
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from infra.host.processes import own_python, start_apart
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError

log = logging.getLogger(__name__)
LOG = "page.log"
#: Seconds between two reports, and how much longer than one takes that has to be.
EVERY_S = 30.0
PAUSE = 9.0
#: A report that takes longer than this is given up.
LONGEST_S = 300.0


class LivePage:
    """Keeps the page of one sweep fresh, from a thread that begins with the first round.

    Parameters
    ----------
    workspace, sweep
        Whose page.
    every_s
        Seconds from the end of one report to the beginning of the next, at least.
    warn
        Hears, once, that a report could not be made, and where the reason stands.
    """

    def __init__(
        self,
        workspace: Workspace,
        sweep: str,
        *,
        every_s: float = EVERY_S,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self._workspace, self._sweep = workspace, sweep
        self._every_s, self._warn = every_s, warn
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._warned = False

    @property
    def folder(self) -> Path:
        """Folder of the report."""
        return self._workspace.layout.reports / self._sweep

    def tick(self) -> None:
        """Begin to make reports."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_fresh, daemon=True)
            self._thread.start()

    def end(self, timeout_s: float = 60.0) -> None:
        """Make the last report, of how it has all ended, and wait for it at most ``timeout_s``.
        Where nothing was ever at work (no :meth:`tick`), the report that there is still holds."""
        if self._thread is not None:
            self._over.set()
            self._thread.join(timeout_s)  # one that has begun says that the sweep still runs
            self._make(timeout_s)

    def close(self) -> None:
        """End a report that is being made; the newest complete one stays."""
        self._warned = True
        self._over.set()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _keep_fresh(self) -> None:
        pause_s = self._every_s / 3
        while not self._over.wait(pause_s):
            began = time.monotonic()
            self._make(LONGEST_S)
            pause_s = max(self._every_s, PAUSE * (time.monotonic() - began))

    def _make(self, timeout_s: float) -> None:
        """Make one report, in a process of its own."""
        why, words = "", ["-P", "-m", __name__, str(self._workspace.root), self._sweep]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LOG).open("wb") as output:
                env = {**own_python(), "OMP_NUM_THREADS": "1"}
                process = self._process = start_apart([sys.executable, *words], output, env)
            try:
                if process.wait(timeout_s) != 0:
                    why = f"could not be made; {self.folder / LOG} says why"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                why = f"took longer than {timeout_s:.0f} s and was given up"
        except OSError as error:
            why = f"cannot be made: {error}"
        if why and not self._warned:
            self._warned = True
            self._warn(
                f"The report of {self._sweep} {why}. The sweep is not affected; "
                f"`refiner report {self._sweep}` makes it by hand."
            )


def main(argv: list[str]) -> int:
    """Make one report at low priority."""
    root, sweep = argv
    with contextlib.suppress(OSError):  # what may not be slowed down runs at full speed
        os.nice(10)
    from flows.reporting.writing import report_sweep  # templates are of no use to who only ticks

    try:
        report_sweep(sweep, root)
    except RefinerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
