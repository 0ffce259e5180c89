"""Orchestrates a call to its end, with its progress on the terminal.

In: a source of members, a console. Out: every stage's last view. Work begins at once; what shows it
elsewhere (:mod:`flows.running.background`) comes after, and is never waited for.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from types import FrameType

from flows.running.console import Console
from infra.disk.keeper import DiskEvent, DiskKeeper, DiskWatch
from infra.jobs.dispatch import Router
from infra.orchestrator.members import Source
from infra.orchestrator.orchestrator import Orchestrator
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.types import StageView

#: Signals closer together than this are one wish: a shell and a scheduler may send several.
_ONE_WISH_S = 1.0
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _StopSignals:
    """Signals that would raise ``KeyboardInterrupt`` are noted while the context lasts. Outside of
    the main thread, which alone gets any, it does nothing."""

    def __init__(self) -> None:
        self._old: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: list[tuple[int, float]] = []
        self._first_at: float | None = None

    def __enter__(self) -> _StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                old = signal.getsignal(number)
                if callable(old):  # else it is ignored, or ends the process
                    self._old[number] = old
                    signal.signal(number, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the old handlers back. More than once does no harm."""
        for number, old in self._old.items():
            signal.signal(number, old)
        self._old = {}

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Note that a signal came."""
        self._came.append((number, time.monotonic()))

    def asked(self) -> str:
        """Name of what has asked to stop, the first time after that; else empty.

        Raises
        ------
        KeyboardInterrupt
            It was asked again, and not in the same breath: somebody wants to leave.
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
class Launch:
    """Manner in which a run or a sweep is worked on.

    Attributes
    ----------
    use_server, quiet
        As of :func:`flows.api.run_recipe`.
    past_canary
        Of a sweep: release the other trials whatever the first one shows.
    take_over
        Though a process on another host says that it works on it.
    resumed
        It was begun by an earlier call: what was cancelled goes on.
    """

    use_server: bool = True
    quiet: bool = False
    past_canary: bool = False
    take_over: bool = False
    resumed: bool = False


class Hears:
    """Listener to a call that may tell somebody; this one tells nobody."""

    def show(self, views: Mapping[str, StageView]) -> None:
        """Hear how all stages are now."""

    def asked_to_stop(self, why: str) -> None:
        """Somebody wants it to end."""

    def over(self, views: Mapping[str, StageView]) -> None:
        """Nothing more will happen."""

    def broke(self, error: BaseException) -> None:
        """The work on it has ended with an error."""

    def close(self) -> None:
        """Wait a while for what is on its way."""


def orchestrate(
    source: Source,
    workspace: Workspace,
    router: Router,
    config: RecipeConfig,
    *,
    console: Console,
    hears: Hears | None = None,
    begun: Callable[[], None] = lambda: None,
) -> dict[str, StageView]:
    """Work on what a source gives until nothing is left to do, shown on the terminal.

    Parameters
    ----------
    source
        Gives the members: a run, trials of a sweep, checkpoints of a night.
    workspace, router
        Where they are recorded, and where jobs run.
    config
        What they have in common: its ``dispatch`` and ``disk``.
    console, hears, begun
        As for :func:`run_shown`.
    """
    keeper = DiskKeeper(workspace, config.disk)
    orchestrator = Orchestrator(source, workspace, router, config, keeper=keeper)

    def tell(event: DiskEvent) -> None:
        source.note({"event": event.kind, "message": event.message, "bytes": event.bytes})

    with DiskWatch(keeper, orchestrator.next_save_bytes, tell):
        return run_shown(orchestrator, console=console, hears=hears, begun=begun)


def run_shown(
    orchestrator: Orchestrator,
    *,
    console: Console,
    hears: Hears | None = None,
    begun: Callable[[], None] = lambda: None,
) -> dict[str, StageView]:
    """Run an orchestrator to its end, showing it on the terminal.

    The first Ctrl-C asks it to stop and waits until its stages have saved; the second is
    raised here.

    Parameters
    ----------
    orchestrator
        What works, in a thread of its own.
    console
        Shows how its stages are.
    hears
        Tells people elsewhere.
    begun
        Called once work has begun.

    Returns
    -------
    dict of str to StageView
        The last view of each stage.
    """
    hears = hears or Hears()
    with _StopSignals() as signals:
        orchestrator.start()  # work begins before anything else is even imported
        try:
            begun()
            views = _until_joined(orchestrator, console, hears, signals)
            signals.restore()  # Ctrl-C leaves what follows
            hears.over(views)
            console.finish(views)
            return views
        except BaseException as error:
            hears.broke(error)
            raise
        finally:
            console.close()
            hears.close()


def _until_joined(
    orchestrator: Orchestrator, console: Console, hears: Hears, signals: _StopSignals
) -> dict[str, StageView]:
    ended: Future[dict[str, StageView]] = Future()

    def join() -> None:
        try:
            ended.set_result(orchestrator.join())
        except BaseException as error:  # raised again in the main thread
            ended.set_exception(error)

    # The main thread stays free for the terminal and Ctrl-C.
    threading.Thread(target=join, name="orchestrator-join", daemon=True).start()
    while not wait([ended], _REFRESH_S).done:
        if by := signals.asked():
            hears.asked_to_stop(f"stopped by {by}")
            orchestrator.request_stop(by)
            console.note(
                f"Stopping ({by}): running stages save at their next step. Ctrl-C again leaves."
            )
        views = orchestrator.views()
        try:
            console.show(views)
            hears.show(views)
        except KeyboardInterrupt:  # by a handler that somebody has installed since
            signals.note(signal.SIGINT)
    return ended.result()
