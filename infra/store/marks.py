"""What people and the reaper note about stages' files: pins, and what was reclaimed.

In: a workspace's layout and a stage. Out: ``disk/pins/<stage id>.json`` (nothing of the stage may
be reclaimed), and ``reclaimed.json`` beside a result (which output files are gone on purpose, and
where a verified copy lies), written before anything is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from infra.host.reading import names_in
from infra.store import atomic
from infra.store.layout import Layout, StagePaths
from refiner_core.contract.records import OutputFile, to_json

RECLAIMED = "reclaimed.json"
_ENDING = ".json"


def pin(layout: Layout, stage_id: str) -> bool:
    """Keep all of a stage's files; False if it was pinned before."""
    folder = layout.disk / "pins"
    folder.mkdir(parents=True, exist_ok=True)
    return atomic.create_json(folder / f"{stage_id}{_ENDING}", {"stage_id": stage_id, "at": _now()})


def unpin(layout: Layout, stage_id: str) -> bool:
    """Let the policy decide again; False if it was not pinned."""
    path = layout.disk / "pins" / f"{stage_id}{_ENDING}"
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def pins(layout: Layout) -> frozenset[str]:
    """Stages that are pinned."""
    names = names_in(layout.disk / "pins")
    found = (n.removesuffix(_ENDING) for n in names if n.endswith(_ENDING))
    return frozenset(n for n in found if not n.startswith(atomic.TEMPORARY))


class Reason(NamedTuple):
    """Why output files go, where their copy is, and the command that brings them back."""

    why: str
    copy: str
    way_back: str


def write_reclaimed(stage: StagePaths, files: Sequence[OutputFile], reason: Reason) -> None:
    """Note that output files are about to be deleted on purpose, and where their copy lies."""
    value = {"version": 1, "at": _now(), **reason._asdict(), "files": to_json(list(files))}
    atomic.write_json(stage.control / RECLAIMED, value)


def read_reclaimed(stage: StagePaths) -> Mapping[str, Any] | None:
    """What was noted when a stage's output was reclaimed; None if it never was.

    Raises
    ------
    ValueError
        The note is not JSON.
    """
    value: Mapping[str, Any] | None = atomic.read_json(stage.control / RECLAIMED)
    return value


def reclaimed_text(stage: StagePaths) -> str | None:
    """For people: when and why files of the output went, and where they can be had again."""
    value = read_reclaimed(stage)
    if value is None:
        return None
    day = str(value["at"])[:10]
    text = f"it was reclaimed on {day} ({value['why']}); its copy is {value['copy']}"
    way_back = value.get("way_back")  # notes of older versions have none
    return f"{text}; to bring it back: `{way_back}`" if way_back else text


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
