"""Runs a campaign with its picture in Prefect and its progress on the terminal.

In: a campaign that has not begun, its plan, the run's id. Out: every stage's last view. The
campaign begins at once and never waits for Prefect; the picture is drawn by a *process of its own*
(:mod:`flows.picture.drawer`) that is told of changes through a pipe.

Why a process and not a thread of the orchestrator: Ctrl-C reaches the orchestrator alone and is
not caught by Prefect's own handlers; after ``kill -9`` the process sees the pipe close and marks
the run as crashed at once, which no thread could; Prefect's threads, which an interpreter waits
for when it ends, cannot hold up our exit while a server hangs; and importing Prefect, which takes
seconds, does not compete with the reconciler for the interpreter lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Literal, Protocol

from flows.notifying.hears import Hears, Nobody
from flows.picture.drawer import DRAWN, NO_SERVER
from flows.picture.feed import END_LINE, Drawing, Story, drawing_of, header_line, view_line
from flows.running.stop_signals import StopSignals
from infra.host.environment import environment
from infra.host.processes import ProcessId
from infra.prefect_server.server import passed_on
from infra.prefect_server.state import state_dir
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.plan import Plan
from refiner_core.contract.views import StageView

#: How long a finished run waits for its picture.
CATCH_UP_S = 20.0
_REFRESH_S = 0.5
_TRIES = 2
_LOGS_KEPT = 20


class Runnable(Protocol):
    """What is asked of a campaign here. ``infra.campaign.campaign.Campaign`` is one."""

    def start(self) -> None:
        """Begin, in a thread of its own."""
        ...

    def views(self) -> dict[str, StageView]:
        """How every stage is now."""
        ...

    def request_stop(self, reason: str) -> None:
        """Ask every running stage to save and stop."""
        ...

    def join(self) -> dict[str, StageView]:
        """Wait for the end; raise what ended the reconciler, if anything did."""
        ...


class Shows(Protocol):
    """What is asked of a console here. :class:`flows.running.console.Console` is one."""

    def show(self, views: Mapping[str, StageView]) -> None:
        """Bring the display up to date."""
        ...

    def note(self, message: str) -> None:
        """Say something in between."""
        ...

    def warn(self, message: str) -> None:
        """Say something that is amiss, but stops nothing."""
        ...

    def finish(self, views: Mapping[str, StageView]) -> None:
        """Say how it ended and what to do next."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was. May be called twice."""
        ...


def run_pictured(
    campaign: Runnable,
    plan: Plan,
    run: str,
    *,
    use_server: bool,
    console: Shows,
    story: Story | None = None,
    hears: Hears | None = None,
) -> dict[str, StageView]:
    """Run a campaign to its end, showing it on the terminal and, if wanted, in Prefect.

    ``story`` says where the run's event log is and whether it goes on with an earlier call;
    ``hears`` tells people elsewhere.

    The first Ctrl-C asks the campaign to stop and waits until its stages have saved; the second is
    raised here. What happens to the picture never changes what is returned.
    """
    drawing = drawing_of(plan, run, str(ProcessId.of()), story)  # the story so far is not news
    return run_drawn(campaign, drawing, use_server=use_server, console=console, hears=hears)


def run_drawn(
    campaign: Runnable,
    drawing: Drawing,
    *,
    use_server: bool,
    console: Shows,
    hears: Hears | None = None,
) -> dict[str, StageView]:
    """As :func:`run_pictured`, for a graph that the caller has made."""
    hears = hears or Nobody()
    with StopSignals() as signals:
        campaign.start()  # work begins before anything else is even imported
        picture = Picture(drawing, console) if use_server else None
        try:
            if picture:
                picture.start()
            views = _until_joined(campaign, picture, console, hears, signals)
            signals.restore()  # Ctrl-C leaves what follows
            hears.over(views)
            console.finish(views)
            if picture:
                picture.show(views)
                picture.end(CATCH_UP_S)
            return views
        except BaseException as error:
            hears.broke(error)
            raise
        finally:
            console.close()
            if picture:
                picture.leave()
            hears.close()


def _until_joined(
    campaign: Runnable,
    picture: Picture | None,
    console: Shows,
    hears: Hears,
    signals: StopSignals,
) -> dict[str, StageView]:
    joiner = _Joiner(campaign)
    joiner.start()
    while not joiner.over.wait(_REFRESH_S):
        if by := signals.asked():
            hears.asked_to_stop(f"stopped by {by}")
            campaign.request_stop(by)
            console.note(
                f"Stopping ({by}): running stages save at their next step. Ctrl-C again leaves."
            )
        views = campaign.views()
        try:
            console.show(views)
            hears.show(views)
            if picture:
                picture.show(views)
        except KeyboardInterrupt:  # by a handler that somebody has installed since
            signals.note(signal.SIGINT)
    return joiner.views()


class _Joiner(threading.Thread):
    """Waits for the campaign, so that the main thread stays free for the terminal and Ctrl-C."""

    def __init__(self, campaign: Runnable) -> None:
        super().__init__(name="campaign-join", daemon=True)
        self.over = threading.Event()
        self._campaign = campaign
        self._views: dict[str, StageView] = {}
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._views = self._campaign.join()
        except BaseException as error:  # raised again in the main thread, by views()
            self._error = error
        self.over.set()

    def views(self) -> dict[str, StageView]:
        if self._error is not None:
            raise self._error
        return self._views


class Picture:
    """The orchestrator's side of the picture. No call waits for Prefect, except ``end``."""

    def __init__(self, drawing: Drawing, console: Shows) -> None:
        self._drawing, self._console = drawing, console
        self._views: dict[str, StageView] = {}
        self._changed = threading.Condition()
        self._ending: Literal["", "complete", "broken off"] = ""
        self._closing = threading.Event()  # the orchestrator leaves and wants no more messages
        self._process: subprocess.Popen[str] | None = None
        self._gone = ""
        self.url = ""  # of the flow run, once there is one
        self._thread = threading.Thread(target=self._run, name="picture", daemon=True)

    def start(self) -> None:
        """Begin to draw, in the background."""
        self._thread.start()

    def show(self, views: Mapping[str, StageView]) -> None:
        """Note how the stages are; what changed is sent by the thread."""
        with self._changed:
            if dict(views) != self._views:
                self._views = dict(views)
                self._changed.notify_all()

    def end(self, timeout_s: float) -> None:
        """Nothing more will change. Wait a while for the picture to be complete, then leave."""
        with self._changed:
            self._ending = "complete"
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            pid = self._process.pid if self._process else 0
            self._console.warn(
                f"The picture in Prefect is not complete yet; process {pid} goes on with it for up "
                "to two minutes. The results are not affected."
            )

    def leave(self) -> None:
        """Send no more; stages that have not ended are shown as crashed. Does not wait."""
        self._closing.set()
        with self._changed:
            self._ending = self._ending or "broken off"
            self._changed.notify_all()

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        """Draw; when the server is lost, once more from the beginning, then give up."""
        warned = False
        for _ in range(_TRIES):
            try:
                code = self._draw()
            except (OSError, RefinerError) as error:
                self._gone, code = str(error), NO_SERVER
            if code == DRAWN or self._closing.is_set():
                return
            if not warned:  # once, whatever comes of the second try
                warned = True
                self._console.warn(
                    f"There is no picture in Prefect: {self._gone or f'see {self._log_path()}'} "
                    "Work goes on without it."
                )
            if code == NO_SERVER:
                return

    def _draw(self) -> int:
        """Start a drawing process, tell it everything that happens, return its exit code."""
        with self._log_path().open("ab") as log:
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flows.picture.drawer"],
                env=_drawer_env(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C in the terminal is for the orchestrator
            )
        assert process.stdin
        assert process.stdout
        listener = threading.Thread(target=self._listen, args=(process.stdout,), daemon=True)
        listener.start()
        with contextlib.suppress(BrokenPipeError):  # it has ended; its exit code says why
            self._tell(process, process.stdin)
        code = process.wait()
        listener.join(1.0)
        return code

    def _tell(self, process: subprocess.Popen[str], stream: IO[str]) -> None:
        stream.write(header_line(self._drawing))
        sent: dict[str, StageView] = {}
        while process.poll() is None:
            with self._changed:
                if not self._ending and self._views == sent:
                    self._changed.wait(1.0)
                views, ending = self._views, self._ending
            for name, view in views.items():
                if sent.get(name) != view:
                    stream.write(view_line(view))
            sent = dict(views)
            stream.write(END_LINE if ending == "complete" else "")
            stream.flush()
            if ending:
                stream.close()
                return

    def _listen(self, stream: IO[str]) -> None:
        server = ""
        for line in stream:
            message = json.loads(line)
            server = message.get("server", server)
            self._gone = message.get("gone", self._gone)
            if flow_run := message.get("flow_run"):
                self.url = f"{server}/runs/flow-run/{flow_run}"
                if not self._closing.is_set():
                    self._console.note(f"Prefect: {self.url}")

    def _log_path(self) -> Path:
        folder = state_dir() / "pictures"
        folder.mkdir(mode=0o700, exist_ok=True)
        prune_logs(folder)
        return folder / f"{self._drawing.run}.log"


def _drawer_env() -> dict[str, str]:
    """Little of our environment: the drawing process needs no token of ours."""
    root = str(Path(__file__).resolve().parents[2])
    env = passed_on(environment())
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    return env | {"OMP_NUM_THREADS": "1", "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore"}


def prune_logs(folder: Path, keep: int = _LOGS_KEPT) -> None:
    """Delete all but the newest logs of pictures."""
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    for path in logs[:-keep]:
        path.unlink(missing_ok=True)
