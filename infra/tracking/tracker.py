"""W&B as a second place for metrics; our own JSON lines are the truth.

In: ``log(step, metrics)``. Out: an offline (or online) W&B run, whose id is the stage's, whose
group is ``tracking.group`` (a sweep's name; else the recipe's) and whose job type is the stage's
kind. It starts with the first metric (starting costs a second or two), and whatever goes wrong in
it is one warning in the log, never an error. Of an online run, ``tracking.json`` beside its files
says where it can be looked at; offline ones are sent later (:mod:`infra.tracking.sync`).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.store import atomic
from refiner_core.contract.config import TrackingConfig

#: Where an online run can be looked at: `{"url": …}`.
ADDRESS_FILE = "tracking.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """What a run is called. ``run_id`` is the same for every attempt at a stage."""

    run_id: str
    name: str
    group: str
    job_type: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)


def without_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's identity as others may see it: where something lies on this machine is masked."""
    return {
        name: "(a path)" if isinstance(value, str) and value.startswith(("/", "~")) else value
        for name, value in values.items()
    }


class Tracker:
    """A metrics sink that never raises."""

    def __init__(self, config: TrackingConfig, run: TrackedRun) -> None:
        self._config, self._run = config, run
        self._wandb_run: Any = None
        self._off = config.wandb == "disabled"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on one step's numbers; those that are not finite are left out."""
        if self._off:
            return
        try:
            if self._wandb_run is None:
                self._wandb_run = start_run(self._config, self._run)
                self._note_address()
            finite = {k: float(v) for k, v in metrics.items() if math.isfinite(float(v))}
            self._wandb_run.log(finite, step=step)
        except Exception as error:  # a tracker must never stop a training, whatever it raises
            self._give_up("logging to W&B", error)

    def finish(self, exit_code: int = 0) -> None:
        """End the run, if it has begun."""
        run, self._wandb_run = self._wandb_run, None
        if run is None:
            return
        try:
            run.finish(exit_code=exit_code)
        except Exception as error:  # as above
            self._give_up("finishing the W&B run", error)

    def _note_address(self) -> None:
        """Write down where an online run can be looked at; an offline one can be nowhere."""
        address = getattr(self._wandb_run, "url", None)
        if self._config.wandb != "online" or not address:
            return
        try:
            atomic.write_json(self._run.folder / ADDRESS_FILE, {"url": str(address)})
        except OSError as error:
            log.warning("the address of the W&B run, %s, could not be noted: %s", address, error)

    def _give_up(self, doing: str, error: Exception) -> None:
        self._off = True
        log.warning("%s failed; metrics go on in metrics.jsonl only: %s", doing, error)


def start_run(config: TrackingConfig, run: TrackedRun) -> Any:
    """A W&B run that keeps nothing but what it is given; all its files lie in ``run.folder``."""
    folder = run.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        os.environ[name] = str(folder)
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    settings = wandb.Settings(
        console="off",
        save_code=False,
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,  # it would record the command line and the environment's details
        x_disable_stats=True,
        silent=True,
    )
    online = config.wandb == "online"
    return wandb.init(
        project=config.project,
        entity=config.entity,
        mode=config.wandb,
        id=run.run_id,
        name=run.name,
        group=run.group,
        notes=config.notes or None,
        job_type=run.job_type,
        dir=str(folder),
        config=dict(run.config),
        resume="allow" if online else None,
        settings=settings,
    )


def tracked_address(folder: Path) -> str | None:
    """Where the online run can be looked at whose files lie in ``folder``; None for any other."""
    try:
        noted = atomic.read_json(folder / ADDRESS_FILE) or {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read: %s", folder / ADDRESS_FILE, error)
        return None
    address = noted.get("url")
    return str(address) if address else None
