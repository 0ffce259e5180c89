"""Requests to stop that come as signals, while something runs that nobody may leave half-way.

In: Ctrl-C, SIGTERM, a closed terminal, as often and as close together as they come. Out: for who
looks between two steps, what has asked. A handler only notes: an exception that it raised could
come anywhere, also while the first request is being carried out, and then jobs would go on that
nobody had asked to end.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

#: Signals closer together than this are one wish: a shell and a scheduler may send several.
_ONE_WISH_S = 1.0
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Signals that would raise ``KeyboardInterrupt`` are noted while the context lasts. Outside of
    the main thread, which alone gets any, it does nothing."""

    def __init__(self) -> None:
        self._old: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: list[tuple[int, float]] = []
        self._first_at: float | None = None

    def __enter__(self) -> StopSignals:
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

    def wait(self, seconds: float) -> None:
        """Sleep for so long, or until a signal comes."""
        until = time.monotonic() + seconds
        while not self._came and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))

    def asked(self) -> str:
        """What has asked to stop, the first time that it is looked for after that; else empty.

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
