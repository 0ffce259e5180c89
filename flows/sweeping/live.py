"""The page of a sweep while it runs: made again now and then, by a process of its own.

In: a workspace and a sweep that somebody works on. Out: the report's files, kept fresh without
anybody asking. Who works on the sweep calls :meth:`LivePage.tick` in its rounds and
:meth:`LivePage.end` when nothing more will happen; neither waits for a report, except ``end`` for
the last one. Making one may take a while, so it is made in another process, with low priority, and
no more often than that it takes a tenth of the time. Why one could not be made stands in
``page.log`` beside it; it never disturbs the sweep.

    python -m flows.sweeping.live WORKSPACE SWEEP      makes it once
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
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


def refresh_page(workspace: Workspace, sweep: str) -> Path:
    """Make the report once more, here and now; returns the page's path.

    Raises
    ------
    RefinerError
        There is no such sweep, no room, or records cannot be read.
    """
    from flows.reporting.writing import report_sweep  # templates are of no use to who only ticks

    return report_sweep(sweep, workspace.root).page


class LivePage:
    """Keeps the page of one sweep fresh. Not for several threads.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workspace, self._sweep = workspace, sweep
        self._every_s, self._warn, self._clock = every_s, warn, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._began = self._due = self._clock()
        self._due += every_s / 3
        self._watched = self._warned = False

    @property
    def folder(self) -> Path:
        """Folder of the report."""
        return self._workspace.layout.reports / self._sweep

    def tick(self) -> None:
        """Begin another report if it is time for one. Takes milliseconds."""
        now, self._watched = self._clock(), True
        if self._process is not None:
            if self._process.poll() is None:
                if now - self._began > LONGEST_S:
                    self._give_up(f"took longer than {LONGEST_S:.0f} s")
                return
            self._note_end(now)
        if now >= self._due:
            self._begin(now)

    def end(self, timeout_s: float = 60.0) -> None:
        """Make the last report, of how it has all ended, and wait for it at most ``timeout_s``.
        Where nothing was ever at work (no :meth:`tick`), the report that there is still holds."""
        if not self._watched:
            return
        deadline = self._clock() + timeout_s
        self._wait(deadline)  # one that has begun before the end says that the sweep still runs
        self._begin(self._clock())
        self._wait(deadline)

    def close(self) -> None:
        """End a report that is being made; the newest complete one stays."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._process = None

    # ------------------------------------------------------------ one report

    def _begin(self, now: float) -> None:
        self._began = now
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LOG).open("wb") as output:
                words = ["-P", "-m", __name__, str(self._workspace.root), self._sweep]
                env = {**own_python(), "OMP_NUM_THREADS": "1"}
                self._process = start_apart([sys.executable, *words], output, env)
        except OSError as error:
            self._due = now + LONGEST_S
            self._say(f"cannot be made: {error}")

    def _note_end(self, now: float) -> None:
        process, self._process = self._process, None
        self._due = now + max(self._every_s, PAUSE * (now - self._began))
        if process is not None and process.returncode != 0:
            self._say(f"could not be made; {self.folder / LOG} says why")

    def _wait(self, deadline: float) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - self._clock()))
        except subprocess.TimeoutExpired:
            self._give_up("took too long")
            return
        self._note_end(self._clock())

    def _give_up(self, why: str) -> None:
        self.close()
        self._due = self._clock() + LONGEST_S
        self._say(f"{why} and was given up")

    def _say(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"The report of {self._sweep} {what}. The sweep is not affected; "
                f"`refiner report {self._sweep}` makes it by hand."
            )


def main(argv: list[str]) -> int:
    """Make one report at low priority."""
    root, sweep = argv
    with contextlib.suppress(OSError):  # what may not be slowed down runs at full speed
        os.nice(10)
    try:
        refresh_page(Workspace.read_only(root), sweep)
    except RefinerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
