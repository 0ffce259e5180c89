"""Logs of stages: their files, and their text from attempt to attempt.

In: a workspace and the names of a stage and a run. Out: text, at once or as it is written.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from flows.running.status import find_run, stage_id_of
from infra.store.orchestrators import orchestrator_of
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError

_FOLLOW_S = 0.5
_PIECE_BYTES = 1 << 20


class AttemptLog(NamedTuple):
    """One attempt's log. If the file does not exist, ``why`` has the reason."""

    attempt: int
    path: Path
    why: str = ""


def find_log(
    stage: str,
    run: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    attempt: int | None = None,
) -> AttemptLog | None:
    """Find the log of a stage's attempt.

    Parameters
    ----------
    stage
        Its name in the run, or its id.
    run
        Run id (default: the newest).
    workspace
        The folder that has its records.
    attempt
        An attempt's number (default: the newest).

    Returns
    -------
    AttemptLog or None
        If the worker never began, the output of its job. None if the stage has not been started.

    Raises
    ------
    ConfigurationError
        There is no such run, stage or attempt.
    """
    ws = Workspace.read_only(workspace)
    stage_id, _, number = _attempt(ws, stage, run, attempt)
    if number is None:
        return None
    path = log_file(ws, stage_id, number)
    return AttemptLog(number, path, why_no_log(ws, stage_id, number, path))


def read_log(
    stage: str,
    run: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    attempt: int | None = None,
) -> str:
    """Output of a stage's worker in one attempt.

    Parameters
    ----------
    stage, run, workspace, attempt
        As of :func:`flows.api.find_log`.

    Returns
    -------
    str
        Empty if the stage has not been started.

    Raises
    ------
    ConfigurationError
        There is no such run, stage or attempt.
    """
    log = find_log(stage, run, workspace, attempt=attempt)
    return "" if log is None else "".join(log_pieces(log.path))


def follow_log(
    stage: str,
    run: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
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
        Receives a message when an attempt's log begins and when an attempt ends.

    Yields
    ------
    str
        New text.

    Raises
    ------
    ConfigurationError
        There is no such run, stage or attempt.
    """
    ws = Workspace.read_only(workspace)
    stage_id, run_id, number = _attempt(ws, stage, run, attempt)
    return _follow(ws, stage_id, run_id, number or 1, tell)


def _attempt(
    workspace: Workspace, stage: str, wanted: str | None, attempt: int | None
) -> tuple[str, str, int | None]:
    """Ids of the stage and its run, and the attempt; None if there is no attempt."""
    run = find_run(workspace, wanted)
    stage_id = stage_id_of(workspace, stage, run)
    numbers = workspace.layout.stage(stage_id).attempt_numbers()
    if attempt is not None and attempt not in numbers:
        known = ", ".join(map(str, numbers))
        raise ConfigurationError(
            f"{stage} has no attempt {attempt}.",
            expected=f"one of: {known or '(it has not been started yet)'}",
            fix="name one of these with --attempt",
        )
    newest = numbers[-1] if numbers else None
    return stage_id, "" if run is None else run.run, attempt or newest


def log_file(workspace: Workspace, stage_id: str, number: int) -> Path:
    """The worker's log; if it never began, the output of its job or of submitit."""
    paths = workspace.layout.attempt(stage_id, number)
    if not paths.log.exists():
        files = (sorted(paths.submitit.glob(p)) for p in ("*_log.err", "*.err", "launcher.log"))
        for found in ([paths.printed], *files):
            said = [p for p in found if p.exists() and p.stat().st_size]
            if said:
                return said[-1]
    return paths.log


def why_no_log(workspace: Workspace, stage_id: str, number: int, path: Path) -> str:
    """Reason why an attempt has no log; empty if it has one."""
    if path.exists():
        return ""
    attempt = workspace.read_attempt(stage_id, number)
    if attempt is not None and attempt.outcome is not None:
        how = f"{attempt.outcome.failure} {attempt.outcome.message}".strip()
        return f"its worker never began; it ended: {how}"
    return "its worker has not begun yet; `refiner status` shows where its job waits"


def log_pieces(path: Path) -> Iterator[str]:
    """Text of a log in pieces, as some logs do not fit into memory. Yields nothing without a
    file."""
    if path.exists():
        with path.open("rb") as file:
            yield from _pieces(file, _decoder())


def _pieces(file: BinaryIO, decoder: codecs.IncrementalDecoder) -> Iterator[str]:
    while data := file.read(_PIECE_BYTES):
        yield decoder.decode(data)


def _follow(
    workspace: Workspace, stage_id: str, run_id: str, number: int, tell: Callable[[str], None]
) -> Iterator[str]:
    """Text of attempt ``number`` as it grows, then of the later attempts."""
    path, position, decoder, waits = Path(), 0, _decoder(), False
    while True:
        if _exists(workspace, stage_id, number):
            attempt = workspace.read_attempt(stage_id, number)
            outcome = attempt.outcome if attempt is not None else None
            over = attempt is None or outcome is not None
            over = over or _exists(workspace, stage_id, number + 1)
            found = log_file(workspace, stage_id, number)
            if found != path and found.exists():
                path, position, decoder = found, 0, _decoder()
                tell(f"==> {path} (attempt {number})")
            if found.exists():
                with path.open("rb") as file:
                    file.seek(position)
                    yield from _pieces(file, decoder)
                    position = file.tell()
            if over:
                if outcome is not None:
                    how = f"{outcome.failure} {outcome.message}".strip()
                    tell(f"==> attempt {number} ended: {how}")
                number, waits = number + 1, False
                continue
        elif _is_over(workspace, stage_id, run_id, number):
            return
        elif not waits:
            waits = True
            tell(f"waiting for attempt {number} of {stage_id}")
        time.sleep(_FOLLOW_S)


def _exists(workspace: Workspace, stage_id: str, number: int) -> bool:
    return workspace.layout.attempt(stage_id, number).intent.exists()


def _is_over(workspace: Workspace, stage_id: str, run_id: str, number: int) -> bool:
    """True if, as far as is known, there will be no attempt ``number``."""
    if workspace.layout.stage(stage_id).result.exists():
        return True
    last = workspace.read_attempt(stage_id, number - 1) if number > 1 else None
    stopped = last is not None and last.outcome is not None and last.outcome.decision == "stop"
    return stopped or not (run_id and orchestrator_of(workspace, run_id).works)


def _decoder() -> codecs.IncrementalDecoder:
    """Decoder for characters that are split between two reads."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace")
