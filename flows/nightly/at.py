"""The context of a night: its file, schedule, workspace, records and recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infra.store.nightly_records import NightlyRecords
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.nightly.schedule import Schedule
from refiner_core.nightly.values import Nightly

Tell = Callable[[str], None]


@dataclass(frozen=True)
class At:
    """Context of a night. ``current`` is the newest night that has begun, ``base`` the recipe."""

    nightly: Nightly
    schedule: Schedule
    workspace: Workspace
    records: NightlyRecords
    current: str
    base: RecipeConfig
    tell: Tell
