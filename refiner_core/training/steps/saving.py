"""Writing a checkpoint while training goes on: one save, in a thread of its own.

In: what is left to do for a save once its state lies in host memory. Out: the same, done; or its
error, raised in the thread that asks for it.

The thread holds the interpreter only between calls that do not: copying to the disk, fsync and
hashing let training run. It is no daemon: a process that ends waits for what it has begun.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class BackgroundSave:
    """A save under way.

    Parameters
    ----------
    step
        Which one.
    write
        All that is left to do. It is let go of when it is done, and with it the state.

    Attributes
    ----------
    seconds
        How long it has taken, once it is :attr:`done`.
    """

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        self.step, self.seconds = step, 0.0
        self._write: Callable[[], None] | None = write
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save of step {step}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has come to an end, good or bad."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for its end.

        Raises
        ------
        BaseException
            What went wrong in it.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        write, self._write = self._write, None
        began = time.monotonic()
        try:
            if write is not None:
                write()
        except BaseException as error:
            self._error = error
        self.seconds = time.monotonic() - began
