"""Where another trainer writes. Pure: makes paths, touches nothing."""

from __future__ import annotations

from pathlib import Path

from infra.store.layout import StagePaths


def work_folder(stage: StagePaths) -> Path:
    """The trainer's ``{output}``: one folder for all attempts, since it goes on from what lies
    there. Once the stage has a result, it holds nothing that the result needs."""
    return stage.data / "work"
