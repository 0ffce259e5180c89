"""`refiner logs`: what a stage's worker printed, from attempt to attempt."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flows.cli.options import split_workspace, until_nobody_reads

if TYPE_CHECKING:
    from infra.store.workspace import Workspace

_FOLLOW_S = 0.5


@click.command("logs")
@click.argument("words", nargs=-1, required=True, metavar="STAGE [RUN] [workspace=DIR]")
@click.option("-f", "--follow", is_flag=True, help="go on printing until the stage ends")
@click.option("--attempt", type=int, help="an attempt's number (default: the newest)")
def logs_command(words: tuple[str, ...], follow: bool, attempt: int | None) -> None:
    """Print the log of STAGE's newest attempt in RUN (default: the newest run).

    With -f it goes over to the next attempt when there is one, and ends when the stage does.
    """
    from infra.store.workspace import Workspace
    from refiner_core.contract.errors import ConfigurationError

    where, rest = split_workspace(words)
    if not rest:
        raise ConfigurationError(
            "`refiner logs` was given no stage.",
            expected="STAGE, such as grpo, and perhaps RUN and workspace=DIR",
            fix="name one; `refiner status` shows the stages of the newest run",
        )
    stage, *runs = rest
    workspace = Workspace.read_only(where)
    stage_id, run_id = _find(workspace, stage, runs[0] if runs else None)
    numbers = workspace.layout.stage(stage_id).attempt_numbers()
    if attempt is not None and attempt not in numbers:
        raise _no_attempt(stage, attempt, numbers)
    if not numbers and not follow:
        click.echo(f"{stage} has not been started yet.", err=True)
        return
    with until_nobody_reads():
        if follow:
            log = Follower(workspace, stage_id, run_id)
            for text in log.follow(attempt or (numbers[-1] if numbers else 1)):
                sys.stdout.write(text)
                sys.stdout.flush()
        else:
            _print_once(workspace, stage_id, attempt or numbers[-1])
        sys.stdout.flush()


def _find(workspace: Workspace, stage: str, wanted: str | None) -> tuple[str, str]:
    """Ids of the stage and of the run that it was looked for in."""
    from flows.running.status import find_run
    from refiner_core.contract.errors import ConfigurationError
    from refiner_core.contract.loading import suggest

    run = find_run(workspace, wanted)
    names = {} if run is None else dict(run.stages)
    stage_id = names.get(stage) or (stage if stage in workspace.stage_ids() else None)
    if stage_id is None:
        raise ConfigurationError(
            f"There is no stage {stage!r} in {'any run' if run is None else f'run {run.run}'} of "
            f"{workspace.root}.{suggest(stage, names)}",
            expected=f"one of: {', '.join(names) or '(no run is recorded)'}",
            fix="name one of these, another run, or another workspace=DIR",
        )
    return stage_id, "" if run is None else run.run


def _no_attempt(stage: str, number: int, numbers: list[int]) -> Exception:
    from refiner_core.contract.errors import ConfigurationError

    return ConfigurationError(
        f"{stage} has no attempt {number}.",
        expected=f"one of: {', '.join(map(str, numbers)) or '(it has not been started yet)'}",
        fix="name one of these with --attempt",
    )


def _print_once(workspace: Workspace, stage_id: str, number: int) -> None:
    path = log_file(workspace, stage_id, number)
    click.echo(f"{path} (attempt {number})", err=True)
    sys.stdout.write(path.read_text(encoding="utf-8", errors="replace") if path.exists() else "")


def log_file(workspace: Workspace, stage_id: str, number: int) -> Path:
    """The worker's log; where it never began, what submitit or the launcher said of it."""
    paths = workspace.layout.attempt(stage_id, number)
    if not paths.log.exists():
        for pattern in ("*_log.err", "*.err", "launcher.log"):
            found = [p for p in sorted(paths.submitit.glob(pattern)) if p.stat().st_size]
            if found:
                return found[-1]
    return paths.log


class Follower:
    """Follows a stage's log from attempt to attempt until the stage ends."""

    def __init__(self, workspace: Workspace, stage_id: str, run_id: str) -> None:
        self._workspace, self._stage_id, self._run_id = workspace, stage_id, run_id

    def follow(self, number: int) -> Iterator[str]:
        """What is in the log of attempt ``number`` and what comes, then those of the later ones."""
        said = ""
        while True:
            if self._exists(number):
                yield from self._follow_one(number)
                number += 1
                said = ""
            if self._is_over(number):
                return
            if not self._exists(number) and not said:
                said = f"waiting for attempt {number} of {self._stage_id}"
                click.echo(said, err=True)
            time.sleep(_FOLLOW_S)

    def _follow_one(self, number: int) -> Iterator[str]:
        path, position, decoder = None, 0, _decoder()
        while True:
            attempt = self._workspace.read_attempt(self._stage_id, number)
            over = attempt is None or attempt.outcome is not None or self._exists(number + 1)
            found = log_file(self._workspace, self._stage_id, number)
            if found != path and found.exists():
                path, position, decoder = found, 0, _decoder()
                click.echo(f"==> {path} (attempt {number})", err=True)
            if path is not None:
                with path.open("rb") as file:
                    file.seek(position)
                    data = file.read()
                position += len(data)
                yield decoder.decode(data)
            if over:
                if attempt is not None and attempt.outcome is not None:
                    how = f"{attempt.outcome.failure} {attempt.outcome.message}".strip()
                    click.echo(f"==> attempt {number} ended: {how}", err=True)
                return
            time.sleep(_FOLLOW_S)

    def _exists(self, number: int) -> bool:
        return self._workspace.layout.attempt(self._stage_id, number).intent.exists()

    def _is_over(self, number: int) -> bool:
        """Whether nothing will come after attempt ``number - 1``, as far as one can tell."""
        from infra.campaign.orchestrators import orchestrator_of

        if self._workspace.layout.stage(self._stage_id).result.exists():
            return True
        if self._exists(number):
            return False
        last = self._workspace.read_attempt(self._stage_id, number - 1) if number > 1 else None
        stopped = last is not None and last.outcome is not None and last.outcome.decision == "stop"
        if stopped:
            return True
        return not (self._run_id and orchestrator_of(self._workspace, self._run_id).works)


def _decoder() -> codecs.IncrementalDecoder:
    """A letter may come in two parts."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace")
