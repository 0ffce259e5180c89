"""Orchestrates a call to its end, with its progress on the terminal.

In: a source of members, a console. Out: every stage's last view. Work begins at once; the process
that shows it elsewhere (:mod:`flows.running.background`) starts later, and nothing waits for it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType

from flows.running.console import Console
from infra.disk.manager import DiskEvent, DiskManager, DiskWatch
from infra.jobs.dispatch import Router
from infra.orchestrator.members import MemberSource
from infra.orchestrator.orchestrator import Orchestrator
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.types import StageView

#: Signals closer together than this are one request: shells and schedulers may send several.
_ONE_WISH_S = 1.0
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _StopSignals:
    """Context that records signals instead of raising ``KeyboardInterrupt``. Does nothing outside
    the main thread, which alone receives signals."""

    def __init__(self) -> None:
        self._old: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: list[tuple[int, float]] = []
        self._first_at: float | None = None

    def __enter__(self) -> _StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                old = signal.getsignal(number)
                if callable(old):  # else the signal is ignored, or ends the process
                    self._old[number] = old
                    signal.signal(number, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the old handlers. May be called twice."""
        for number, old in self._old.items():
            signal.signal(number, old)
        self._old = {}

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Record a signal."""
        self._came.append((number, time.monotonic()))

    def asked(self) -> str:
        """Name of the first stop signal, once; else empty.

        Raises
        ------
        KeyboardInterrupt
            A second, separate request to stop.
        """
        while self._came:
            number, at = self._came.pop(0)
            try:
                self._old.get(number, signal.default_int_handler)(number, None)
            except KeyboardInterrupt:
                if self._first_at is None:
                    self._first_at = at
                    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                if at - self._first_at > _ONE_WISH_S:
                    raise
        return ""


_REFRESH_S = 0.5


@dataclass(frozen=True)
class LaunchOptions:
    """Settings for the work on a run or a sweep.

    Attributes
    ----------
    use_server, quiet
        As of :func:`flows.api.run_recipe`.
    past_canary
        For a sweep: release the other trials whatever the canary shows.
    take_over
        Take over from a process on another host that claims the call.
    resumed
        The call was begun earlier: cancelled stages run again.
    """

    use_server: bool = True
    quiet: bool = False
    past_canary: bool = False
    take_over: bool = False
    resumed: bool = False


class CallObserver:
    """Listener to a call, for notifications; the base class does nothing."""

    def show(self, views: Mapping[str, StageView]) -> None:
        """Receive the views of all stages."""

    def stop_requested(self, why: str) -> None:
        """A stop was requested."""

    def over(self, views: Mapping[str, StageView]) -> None:
        """The call has ended."""

    def broke(self, error: BaseException) -> None:
        """The work has ended with an error."""

    def close(self) -> None:
        """Wait a while for messages in flight."""


def orchestrate(
    source: MemberSource,
    workspace: Workspace,
    router: Router,
    config: RecipeConfig,
    *,
    console: Console,
    observer: CallObserver | None = None,
    begun: Callable[[], None] = lambda: None,
) -> dict[str, StageView]:
    """Work on the members of a source until nothing is left to do, shown on the terminal.

    Parameters
    ----------
    source
        Supplies the members: a run, trials of a sweep, checkpoints of a night.
    workspace, router
        Where they are recorded, and where jobs run.
    config
        Their common settings: ``dispatch`` and ``disk``.
    console, observer, begun
        See :func:`run_shown`.
    """
    disk_manager = DiskManager(workspace, config.disk)
    orchestrator = Orchestrator(source, workspace, router, config, disk_manager=disk_manager)

    def tell(event: DiskEvent) -> None:
        source.note({"event": event.kind, "message": event.message, "bytes": event.bytes})

    with DiskWatch(disk_manager, orchestrator.next_save_bytes, tell):
        return run_shown(orchestrator, console=console, observer=observer, begun=begun)


def run_shown(
    orchestrator: Orchestrator,
    *,
    console: Console,
    observer: CallObserver | None = None,
    begun: Callable[[], None] = lambda: None,
) -> dict[str, StageView]:
    """Run an orchestrator to its end, showing it on the terminal.

    The first Ctrl-C asks it to stop and waits until its stages have saved; a second one is raised
    here.

    Parameters
    ----------
    orchestrator
        Runs in a thread of its own.
    console
        Shows the state of its stages.
    observer
        Sends notifications.
    begun
        Called once work has begun.

    Returns
    -------
    dict of str to StageView
        The last view of each stage.
    """
    observer = observer or CallObserver()
    with _StopSignals() as signals:
        orchestrator.start()  # before any other import
        try:
            begun()
            views = _until_joined(orchestrator, console, observer, signals)
            signals.restore()  # Ctrl-C ends what follows
            observer.over(views)
            console.finish(views)
            return views
        except BaseException as error:
            observer.broke(error)
            raise
        finally:
            console.close()
            observer.close()


def _until_joined(
    orchestrator: Orchestrator, console: Console, observer: CallObserver, signals: _StopSignals
) -> dict[str, StageView]:
    # The main thread stays free for the terminal and Ctrl-C.
    while not orchestrator.wait(_REFRESH_S):
        if by := signals.asked():
            observer.stop_requested(f"stopped by {by}")
            orchestrator.request_stop(by)
            console.note(
                f"Stopping ({by}): running stages save at their next step. Ctrl-C again leaves."
            )
        views = orchestrator.views()
        try:
            console.show(views)
            observer.show(views)
        except KeyboardInterrupt:  # from a handler installed later
            signals.note(signal.SIGINT)
    return orchestrator.join()
