"""A small StageIO over a folder: the one fake that tests of stages share.

Keeps the promises of the protocol that a stage relies on: a checkpoint is visible only after its
block ended well, and metrics and rollouts of steps after the newest checkpoint are gone when a
stage asks for it. Faults are planned by setting the public attributes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import NoSpaceError
from refiner_core.contract.proofs import MEASURED
from refiner_core.contract.types import Progress, SavedCheckpoint


class FolderStageIO:
    """Metrics as JSON lines, rollouts as JSON, checkpoints as ``checkpoints/<step>``.

    ``stop_at``: ask for a stop once this many steps were logged. ``fail_save_at``: the save of this
    step raises after its files were written, and nothing of it becomes visible.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stop_at: int | None = None
        self.fail_save_at: int | None = None
        self.progressed: list[Progress] = []
        for name in ("checkpoints", "rollouts"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        rows = self.metrics()
        assert not rows or rows[-1]["step"] <= step, "steps only grow"
        with self._metrics_path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def save_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        (self.root / "rollouts" / f"{step}.json").write_text(json.dumps([dict(r) for r in rows]))

    def latest_checkpoint(self) -> SavedCheckpoint | None:
        steps = [int(p.name) for p in (self.root / "checkpoints").iterdir() if p.name.isdigit()]
        step = max(steps, default=0)
        self._forget_after(step)
        return SavedCheckpoint(step, self._checkpoint(step)) if steps else None

    def pass_over(self, checkpoint: SavedCheckpoint, why: str) -> None:
        checkpoint.path.rename(checkpoint.path.with_name(f"damaged-{checkpoint.step}"))

    @contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        part = self.root / "checkpoints" / f".{step}.part"
        part.mkdir()
        try:
            yield part
            if self.fail_save_at == step:
                raise OSError("the node went away while saving")
            part.rename(self._checkpoint(step))
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def keep_checkpoints(self, steps: Sequence[int]) -> list[SavedCheckpoint]:
        self.kept = tuple(steps)
        found = [s for s in self.checkpoint_steps() if s in steps]
        return [SavedCheckpoint(step, self._checkpoint(step)) for step in found]

    def room_again(self, error: NoSpaceError) -> bool:
        return False

    def progress(self, progress: Progress) -> None:
        self.progressed.append(progress)

    def should_stop(self) -> bool:
        rows = self.metrics()
        return self.stop_at is not None and bool(rows) and rows[-1]["step"] >= self.stop_at

    # ---- what tests look at

    def metrics(self) -> list[dict[str, Any]]:
        """Logged rows, oldest first; each has its ``step``."""
        if not self._metrics_path.exists():
            return []
        return [json.loads(line) for line in self._metrics_path.read_text().splitlines()]

    def comparable_metrics(self) -> list[dict[str, Any]]:
        """Rows without measurements, which a clock or a judge's store decides."""
        return [
            {k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in self.metrics()
        ]

    def rollouts(self) -> dict[int, list[dict[str, Any]]]:
        """Saved rollouts by step."""
        paths = sorted((self.root / "rollouts").iterdir(), key=lambda p: int(p.stem))
        return {int(p.stem): json.loads(p.read_text()) for p in paths}

    def checkpoint_steps(self) -> list[int]:
        """Steps with a visible checkpoint."""
        names = [p.name for p in (self.root / "checkpoints").iterdir()]
        return sorted(int(name) for name in names if name.isdigit())

    @property
    def _metrics_path(self) -> Path:
        return self.root / "metrics.jsonl"

    def _checkpoint(self, step: int) -> Path:
        return self.root / "checkpoints" / str(step)

    def _forget_after(self, step: int) -> None:
        kept = [row for row in self.metrics() if row["step"] <= step]
        self._metrics_path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        for path in (self.root / "rollouts").iterdir():
            if int(path.stem) > step:
                path.unlink()
