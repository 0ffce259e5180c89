"""What happens between two steps: save, stop, go on. Shared by SFT and GRPO.

In: a :class:`StageIO`, an engine and the stage's progress dictionary. Out: checkpoints, or
:class:`Interrupted` once the step that is under way is saved.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import (
    Interrupted,
    NoSpaceError,
    NotFiniteError,
    WorkspaceError,
)
from refiner_core.contract.types import Progress, StageIO
from refiner_core.training.engines.protocol import Engine

#: Points of a curve that a report keeps; metrics keep all.
CURVE_POINTS = 100
#: How often a save is tried that did not fit.
SAVE_TRIES = 5


@dataclass
class Boundary:
    """Step boundaries of one stage. ``step`` counts finished steps; 0 is the start. It saves every
    ``save_freq`` steps, after the last, and after ``first_save`` where that is given."""

    io: StageIO
    engine: Engine
    stage: str
    total_steps: int
    save_freq: int
    first_save: int | None = None
    saved_step: int = field(default=0, init=False)
    restored: Path | None = field(default=None, init=False)

    def restore(self, data_hash: str) -> dict[str, Any] | None:
        """The progress of the newest checkpoint, its state loaded; None without one.

        Raises
        ------
        WorkspaceError
            If the checkpoint was made by another stage or on other data.
        """
        checkpoint = self.io.latest_checkpoint()
        if checkpoint is None:
            return None
        progress = self.engine.restore(checkpoint.path)
        for key, expected in (("stage", self.stage), ("data_hash", data_hash)):
            if progress.get(key) != expected:
                raise WorkspaceError(
                    f"{checkpoint.path} does not belong to this stage: its {key} is "
                    f"{progress.get(key)}",
                    expected=f"{key} {expected}",
                    fix="remove the checkpoint to start the stage again",
                )
        self.saved_step, self.restored = checkpoint.step, checkpoint.path
        return progress

    def attachment(self, name: str) -> bytes | None:
        """A file that was saved beside the state that was restored; None where there is none."""
        path = None if self.restored is None else self.restored / name
        return path.read_bytes() if path is not None and path.exists() else None

    def save(
        self,
        step: int,
        progress: Mapping[str, Any],
        attachments: Callable[[], Mapping[str, bytes]] = dict,
    ) -> None:
        """Checkpoint after ``step``, unless that is done already or nothing has happened yet.

        ``attachments`` gives further files of rank 0, by name: what is in flight between two steps.
        A disk that fills up in the middle costs a wait, not the steps since the last checkpoint:
        they are still in memory, and are saved once there is room.

        Raises
        ------
        NoSpaceError
            There was no room for too long.
        """
        if step <= self.saved_step:
            return
        snapshot = self.engine.snapshot({"stage": self.stage, **progress})
        files = attachments()
        for tries_left in reversed(range(SAVE_TRIES)):
            try:
                with self.io.new_checkpoint(step) as folder:
                    snapshot.write(folder)
                    if self.engine.ranks.rank == 0:
                        _write_files(folder, files)
                break
            except NoSpaceError as error:
                if not tries_left or not self.io.room_again(error):
                    raise
        self.saved_step = step

    def after(
        self,
        step: int,
        progress: Mapping[str, Any],
        values: Mapping[str, float],
        attachments: Callable[[], Mapping[str, bytes]] = dict,
    ) -> None:
        """Report progress; save where it is due; stop where somebody asks for it.

        Raises
        ------
        Interrupted
            See :meth:`stop_if_asked`.
        """
        self.io.progress(Progress(step, self.total_steps, "train", values))
        self.stop_if_asked(step, progress, attachments)
        due = step % max(1, self.save_freq) == 0 or step == self.first_save
        if step >= self.total_steps or due:
            self.save(step, progress, attachments)

    def stop_if_asked(
        self,
        step: int,
        progress: Mapping[str, Any],
        attachments: Callable[[], Mapping[str, bytes]] = dict,
    ) -> None:
        """Save and stop, where somebody asks for it and steps are left after ``step``.

        May be called wherever the state is that of the end of ``step``.

        Raises
        ------
        Interrupted
            The checkpoint is complete by then.
        """
        if step < self.total_steps and self.io.should_stop():
            self.save(step, progress, attachments)
            raise Interrupted(
                f"{self.stage} stopped on request after step {step} of {self.total_steps}",
                fix="run the same command again to go on from there",
            )


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        with (folder / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def require_finite(stage: str, step: int, **values: float) -> None:
    """Fail on NaN or infinity, before it reaches the weights or right after the norm showed it.

    Raises
    ------
    NotFiniteError
        Names the step and the value.
    """
    for name, value in values.items():
        if not math.isfinite(value):
            raise NotFiniteError(
                f"{stage} step {step}: the {name.replace('_', ' ')} is {value}; "
                "the weights were not updated with it",
                expected="a finite number",
                fix="lower the learning rate or max_grad_norm, or look at the step's data",
            )


def curve(values: Sequence[float | None]) -> list[list[float]]:
    """At most about a hundred ``[step, value]`` points of a curve; the last one always.

    ``values`` has one entry per step; None where a step has no such number (a step whose groups
    were all dropped has no KL).
    """
    known = [[step, value] for step, value in enumerate(values, 1) if value is not None]
    stride = max(1, math.ceil(len(known) / CURVE_POINTS))
    points = known[::stride]
    if known and points[-1] != known[-1]:
        points.append(known[-1])
    return points
