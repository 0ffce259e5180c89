"""A keeper of the disk for orchestrators that are stepped by tests."""

from __future__ import annotations

from dataclasses import dataclass

from infra.jobs.dispatcher import AttemptRef
from infra.orchestrator.waiting import SMALL_BYTES
from infra.store.atomic import has_room
from infra.store.workspace import Workspace


class ProbingKeeper:
    """Knows only whether a write goes through; reclaims nothing."""

    @dataclass(frozen=True)
    class Nothing:
        """Nothing was reclaimed."""

        bytes: int = 0
        items: tuple[str, ...] = ()

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def need_of(self, stage_id: str) -> int:
        """A small file's worth."""
        return SMALL_BYTES

    def free_space(self, need_bytes: int, ref: AttemptRef | None = None) -> Nothing | None:
        """Tell whether ``need_bytes`` can be written, by writing them."""
        layout = self._workspace.layout
        fits = has_room(layout.control, SMALL_BYTES) and has_room(layout.data, need_bytes)
        return self.Nothing() if fits else None

    def lacking(self, need_bytes: int, ref: AttemptRef | None = None) -> str:
        """Bytes: a write that fails says no more."""
        return f"{need_bytes / 2**20:,.1f} MiB"
