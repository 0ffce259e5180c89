"""The records of one run, each read once; what cannot be read becomes a warning.

In: a workspace and a run. Out: a :class:`RunReading`: histories of its stages by name, its events,
its configuration. Whatever else a part of the report has to read goes through
:meth:`RunReading.tried`, so that a damaged file costs that part and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

from flows.running.status import stage_names
from infra.orchestrator.history import run_events, stage_history
from infra.orchestrator.timeline import StageHistory
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.records import Attempt, RunRecord, StageResult, from_json

T = TypeVar("T")
P = ParamSpec("P")
#: What reading a damaged, half-deleted or foreign file may raise.
UNREADABLE = (RefinerError, OSError, ValueError, KeyError, TypeError, AttributeError)


class RunReading:
    """What is known of a run.

    Attributes
    ----------
    histories
        Stage name -> its record and heartbeats, in the order of work; only stages that have begun.
    unreadable
        Stage name -> why its records cannot be read.
    warnings
        What could not be read, in words; grows while parts of the report are made.
    """

    def __init__(self, workspace: Workspace, run: RunRecord) -> None:
        self.workspace, self.run = workspace, run
        self.names = stage_names(run)
        self.warnings: list[str] = []
        self.unreadable: dict[str, str] = {}
        self.histories: dict[str, StageHistory] = {}
        for name in self.names:
            try:
                history = stage_history(workspace, run, name)
            except UNREADABLE as error:
                self.unreadable[name] = said(error)
                self.warnings.append(f"{name} is left out: {said(error)}")
                continue
            if history is not None:
                self.histories[name] = history

    def tried(self, what: str, read: Callable[P, T], *args: P.args, **more: P.kwargs) -> T | None:
        """What ``read`` gives; None, and a warning, where something cannot be read."""
        try:
            return read(*args, **more)
        except UNREADABLE as error:
            self.warnings.append(f"{what} could not be read: {said(error)}")
            return None

    @cached_property
    def config(self) -> RecipeConfig:
        """The recipe; of records that do not have one, the default."""
        found = self.tried("The recipe of the run", from_json, RecipeConfig, self.run.config)
        return found or RecipeConfig()

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The event log of the run."""
        log = self.tried("The event log of the run", run_events, self.workspace, self.run.run)
        return log or []

    def result(self, name: str) -> StageResult | None:
        """What a stage made; None where it is not done."""
        history = self.histories.get(name)
        return None if history is None else history.record.result

    def attempts(self, name: str) -> tuple[Attempt, ...]:
        """All attempts at a stage, oldest first."""
        history = self.histories.get(name)
        return () if history is None else history.record.attempts

    def skipped(self, name: str) -> bool:
        """Whether a stage was there before the run began."""
        result = self.result(name)
        return result is not None and result.finished_at < self.run.started_at

    def own(self) -> Iterator[str]:
        """Stages that this run has worked on."""
        return (name for name in self.histories if not self.skipped(name))

    def of_kind(self, *kinds: str) -> Iterator[tuple[str, StageHistory]]:
        """Stages of these kinds that have begun, in the order of work."""
        for name, history in self.histories.items():
            if history.record.spec.kind in kinds:
                yield name, history

    def config_of(self, name: str) -> RecipeConfig:
        """The configuration that the newest attempt at a stage was made with."""
        stage_id, attempts = self.run.stages[name], self.attempts(name)
        if not attempts:
            return self.config
        newest = self.workspace.layout.attempt(stage_id, attempts[-1].number)
        recorded = self.workspace.part(newest, "config")
        return from_json(RecipeConfig, recorded) if recorded else self.config


def said(error: Exception) -> str:
    """What an error says, in one line."""
    text = error.what if isinstance(error, RefinerError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]
