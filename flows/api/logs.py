"""Logs of stages: where they lie, what is in them, what comes.

In: names of a stage and a run. Out: paths and text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from flows.running.logs import (
    AttemptLog,
    Follower,
    log_file,
    read_log_file,
    stage_of_log,
    why_no_log,
)
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig

_HERE = RecipeConfig.workspace


def find_log(
    stage: str,
    run: str | None = None,
    workspace: str | Path = _HERE,
    *,
    attempt: int | None = None,
) -> AttemptLog | None:
    """Where the log of a stage's attempt lies.

    Parameters
    ----------
    stage
        Its name in the run, or its id.
    run
        Which run (default: the newest).
    workspace
        The folder that it is recorded in.
    attempt
        An attempt's number (default: the newest).

    Returns
    -------
    AttemptLog or None
        Where the worker never began, this is what its job printed. None where the stage
        has not been started yet.

    Raises
    ------
    ConfigurationError
        There is no such run, stage or attempt.
    """
    room = Workspace.read_only(workspace)
    found = stage_of_log(room, stage, run)
    number = found.number(attempt)
    if number is None:
        return None
    path = log_file(room, found.stage_id, number)
    return AttemptLog(number, path, why_no_log(room, found.stage_id, number, path))


def read_log(
    stage: str,
    run: str | None = None,
    workspace: str | Path = _HERE,
    *,
    attempt: int | None = None,
) -> str:
    """What a stage's worker has printed in one attempt.

    Parameters
    ----------
    stage, run, workspace, attempt
        As of :func:`flows.api.find_log`.

    Returns
    -------
    str
        Empty where the stage has not been started yet.

    Raises
    ------
    ConfigurationError
        There is no such run, stage or attempt.
    """
    log = find_log(stage, run, workspace, attempt=attempt)
    return "" if log is None else read_log_file(log.path)


def follow_log(
    stage: str,
    run: str | None = None,
    workspace: str | Path = _HERE,
    *,
    attempt: int | None = None,
    tell: Callable[[str], None] = lambda message: None,
) -> Iterator[str]:
    """The log of a stage as it grows, from attempt to attempt, until the stage ends.

    Parameters
    ----------
    stage, run, workspace, attempt
        As of :func:`flows.api.read_log`.
    tell
        Hears which attempt's log begins, and how one has ended.

    Yields
    ------
    str
        What is new.

    Raises
    ------
    ConfigurationError
        There is no such run, stage or attempt.
    """
    room = Workspace.read_only(workspace)
    found = stage_of_log(room, stage, run)
    number = found.number(attempt)
    follower = Follower(room, found.stage_id, found.run_id, tell)
    return follower.follow(1 if number is None else number)
