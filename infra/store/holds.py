"""Checkpoints that somebody waits for: neither retention nor the reaper may delete them.

In: a plan with stages that read a checkpoint of a training stage (``at_step``). Out: one small file
per waiting stage beside the training stage's record, ``holds/step-00000050-export-0123….json``. It
is there before the trainer is, and is removed once the waiting stage has its result. Several
orchestrators may write the same one; that changes nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path

from infra.host.reading import make_folder, names_in
from infra.store import atomic
from infra.store.checkpoints import MARKER, read_checkpoint, step_name
from infra.store.layout import Layout, StagePaths
from refiner_core.contract.plan import Plan, PlannedStage

log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d+)-.+\.json")


def held_steps(stage: StagePaths) -> frozenset[int]:
    """Steps of a training stage whose checkpoints somebody waits for."""
    found = map(_NAME.fullmatch, names_in(stage.holds))
    return frozenset(int(match.group(1)) for match in found if match)


class Holds:
    """The holds of one plan, kept in step with what is done."""

    def __init__(self, plan: Plan, layout: Layout) -> None:
        self._plan, self._layout = plan, layout
        self._settled: set[Path] = set()

    def keep(self, done: Collection[str]) -> None:
        """Hold what stages of the plan wait for that are not among ``done`` (stage ids), and let go
        of the rest. What a full disk prevents is done by the next call."""
        for stage in self._plan.stages:
            for role, step in stage.at_step.items():
                path = self._path(stage, role, step)
                if stage.id in done:
                    atomic.remove_quietly(path)
                    self._settled.discard(path)
                elif path not in self._settled:
                    self._hold(path, stage)

    def there(self, done: Collection[str]) -> frozenset[tuple[str, int]]:
        """Which of the checkpoints that stages still wait for are complete: (stage id, step)."""
        found = set()
        for stage in self._plan.stages:
            for role, step in stage.at_step.items() if stage.id not in done else ():
                source = self._plan.by_name[stage.inputs[role]].id
                if _is_complete(self._layout.stage(source).checkpoints / step_name(step)):
                    found.add((source, step))
        return frozenset(found)

    def _path(self, stage: PlannedStage, role: str, step: int) -> Path:
        source = self._plan.by_name[stage.inputs[role]].id
        return self._layout.stage(source).holds / f"{step_name(step)}-{stage.id}.json"

    def _hold(self, path: Path, stage: PlannedStage) -> None:
        try:
            make_folder(path.parent)
            atomic.create_json(path, {"for": stage.id, "name": stage.name})
        except OSError as error:
            log.warning("%s could not be noted yet: %s", path, error)
            return
        self._settled.add(path)


def _is_complete(checkpoint: Path) -> bool:
    """Whether it is there. A stage may fail for want of it, so what cannot be read is raised."""
    if read_checkpoint(checkpoint) is not None:
        return True
    try:
        marked = atomic.read_json(checkpoint / MARKER) is not None
    except ValueError:
        return False
    return marked and read_checkpoint(checkpoint) is not None
