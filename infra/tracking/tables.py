"""Tables in W&B: what a report shows, as a run of its own beside those that it is about.

In: tables of plain values. Out: an offline (or online) W&B run with one table each, and where it
can be looked at. Unlike metrics of a training, which nobody waits for, tables are logged because
somebody has asked for them: what goes wrong is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infra.store.room import no_space_guard
from infra.tracking.tracker import TrackedRun, start_run
from refiner_core.contract.config import TrackingConfig
from refiner_core.contract.errors import UnsupportedError


@dataclass(frozen=True)
class Table:
    """Columns by name, rows of text, numbers, booleans and None. A column is of one kind."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def log_tables(config: TrackingConfig, run: TrackedRun, tables: Mapping[str, Table]) -> str:
    """Log the tables; returns the address of an online run, else the folder of an offline one.

    Where a recipe has tracking disabled they are logged offline: they have been asked for.

    Raises
    ------
    UnsupportedError
        W&B cannot begin or take it; says why.
    NoSpaceError
        There is no room for its files.
    """
    if config.wandb == "disabled":
        config = replace(config, wandb="offline")
    with no_space_guard(run.folder, "logging tables to W&B"):
        try:
            return _log(config, run, tables)
        except OSError:
            raise
        except Exception as error:  # whatever W&B raises; some of its classes are no one's public
            raise UnsupportedError(
                f"W&B did not take the tables: {error}",
                expected=f"a run with tracking.wandb={config.wandb}",
                fix="check WANDB_API_KEY and the network, or leave out --wandb: report.csv and "
                "trials.csv hold the same",
            ) from error


def _log(config: TrackingConfig, run: TrackedRun, tables: Mapping[str, Table]) -> str:
    tracked = start_run(config, run)
    import wandb

    try:
        tracked.log(
            {
                name: wandb.Table(
                    columns=list(table.columns), data=[list(row) for row in table.rows]
                )
                for name, table in tables.items()
            }
        )
        address = str(tracked.url) if config.wandb == "online" else str(tracked.dir)
    except BaseException:
        tracked.finish(exit_code=1)
        raise
    tracked.finish()
    return address.removesuffix("/files")
