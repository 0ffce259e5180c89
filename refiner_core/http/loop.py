"""The thread that an event loop runs in, for as long as who has made it lives.

In: calls from any thread. Out: they happen in the loop, in order. Ends quietly: when it is told to,
when its owner is collected, at the end of the process.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple, Unpack

_END_S = 10.0
T = TypeVar("T")
_Values = TypeVarTuple("_Values")


async def _nothing() -> None:
    """Nothing is to be closed."""


class LoopThread:
    """Starts at once. Its owner must not be reached from the callbacks, or is never collected.

    Parameters
    ----------
    name
        Of the thread.
    opened
        Called first in the loop.
    closing
        Awaited last in the loop.
    failed
        Hears, in the loop, what a call raised, or ``opened``.
    """

    def __init__(
        self,
        name: str,
        opened: Callable[[], None] = lambda: None,
        closing: Callable[[], Awaitable[None]] = _nothing,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._opened, self._closing, self._failed = opened, closing, failed
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._over = False
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Unpack[_Values]], None], *values: *_Values) -> None:
        """Have ``function`` called in the loop.

        Raises
        ------
        RuntimeError
            The thread has ended.
        """
        with self._lock:
            if self._over:
                raise RuntimeError("its event loop has ended")
            self._loop.call_soon_threadsafe(self._call, function, *values)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it in the loop, and wait for what it returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def end(self, *, wait: bool = True, timeout_s: float | None = _END_S) -> None:
        """End the loop; nothing where that was done, or in a forked process.

        Who collects garbage does not wait: it may be the loop's own thread.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._over:
                self._over = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _call(self, function: Callable[[Unpack[_Values]], None], *values: *_Values) -> None:
        try:
            function(*values)
        except Exception as error:
            self._failed(error)  # nobody else would hear of it

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._call, self._opened)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._close())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _close(self) -> None:
        await self._closing()
