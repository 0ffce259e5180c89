"""Room for what a worker writes: it is waited for, and others are told of it.

In: saves that are about to begin, writes that did not fit. Out: a reservation, or a while later
whether to try again; and ``room`` beside the attempt, there or not. On a full disk nothing can be
written, not even a last word, and what a job prints and what its scheduler keeps of it lie on the
same disk; but a file can always be deleted. So whoever looks sees that a worker waits, and whoever
finds it ended in silence learns that it was the disk.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from infra.jobs.protocol import AttemptRef
from infra.store.workspace import Workspace
from refiner_core.contract.config import DiskConfig

if TYPE_CHECKING:
    from infra.disk.keeper import DiskKeeper

log = logging.getLogger(__name__)

Part = Literal[
    "save",  # room for a checkpoint is waited for
    "write",  # room for metrics or rollouts is
    "heartbeat",  # it could not be written
    "end",  # the attempt ends for want of room, or its last word could not be written
]


class AttemptRoom:
    """The room of one attempt; its threads share it. ``stop_asked``: nobody waits any longer."""

    def __init__(
        self,
        workspace: Workspace,
        ref: AttemptRef,
        config: DiskConfig,
        stop_asked: Callable[[], bool],
    ) -> None:
        self._workspace, self._ref, self._config = workspace, ref, config
        self._stop_asked = stop_asked
        self._keeper: DiskKeeper | None = None
        self._lacking: set[Part] = set()

    def tell(self, part: Part, *, there: bool) -> None:
        """Say whether a part of the worker has room: the file is there while none lacks any. Never
        raises; what could not be said, or was overtaken by another thread's word, is said with the
        next heartbeat."""
        if there:
            self._lacking.discard(part)
        else:
            self._lacking.add(part)
        try:
            self._workspace.note_room(*self._ref, there=not self._lacking)
        except OSError as error:
            log.debug("whether there is room cannot be said: %s", error)

    @contextlib.contextmanager
    def reserve(self) -> Iterator[None]:
        """Room for the next save, kept free of other jobs.

        Raises
        ------
        NoSpaceError
            There was none for as long as a running job may wait (`disk.hold_s`).
        """
        with self.keeper.reserve(self._ref, self.keeper.need_of(self._ref.stage_id)):
            self.tell("save", there=True)
            yield

    def wait(self) -> bool:
        """Make room, or wait for it as long as a running job may; True if there is some."""
        deadline = time.monotonic() + self._config.hold_s
        while time.monotonic() < deadline and not self._stop_asked():
            need = self.keeper.need_of(self._ref.stage_id)
            if self.keeper.make_room(need, self._ref) is not None:
                self.tell("write", there=True)
                return True
            self.tell("write", there=False)
            time.sleep(min(1.0, self._config.watch_s / 4))
        return False

    @property
    def keeper(self) -> DiskKeeper:
        """The room of the workspace, as this attempt asks for it."""
        from infra.disk.keeper import DiskKeeper

        if self._keeper is None:
            self._keeper = DiskKeeper(
                self._workspace,
                self._config,
                sleep=self._wait_to_save,
                stop_asked=self._stop_asked,
            )
        return self._keeper

    def _wait_to_save(self, seconds: float) -> None:
        self.tell("save", there=False)
        time.sleep(seconds)
