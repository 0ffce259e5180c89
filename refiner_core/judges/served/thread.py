"""The thread that an engine's event loop runs in, for as long as its judge lives.

In: calls from any thread. Out: they happen in the loop, in order. Ends quietly: when it is told to,
when its judge is collected, at the end of the process.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import TypeVarTuple, Unpack

from refiner_core.judges.served.engine import Engine

_END_S = 10.0
_Values = TypeVarTuple("_Values")


class EngineThread:
    """Starts at once. Holds the engine, and not the judge, which could never be collected then."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._over = False
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="refiner-judge", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Unpack[_Values]], None], *values: *_Values) -> None:
        """Have ``function`` called in the loop; what it raises ends all that waits there.

        Raises
        ------
        RuntimeError
            The thread has ended.
        """
        with self._lock:
            if self._over:
                raise RuntimeError("the judge was closed")
            self._loop.call_soon_threadsafe(self._call, function, *values)

    def end(self) -> None:
        """End the loop and wait for it; nothing where that was done, or in a forked process."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._over:
                self._over = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)

    def _call(self, function: Callable[[Unpack[_Values]], None], *values: *_Values) -> None:
        try:
            function(*values)
        except Exception as error:
            self.engine.fail(error)  # nobody else would hear of it

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self.engine.open)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self.engine.close())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
