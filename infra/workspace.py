"""The workspace: records of stages and runs on disk, and the only code that knows where they lie.

In: planned stages, results, outcomes. Out: :class:`StageRecord` and :class:`RunRecord` values.
Every file has one writer; what several may want to write (a claim, a start, an outcome, a result)
is created exclusively, so exactly one wins. No locks and no database: it works on NFS and Lustre,
for several orchestrators and users at once.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from infra import atomic
from infra.disk.room import has_room, no_space_error, no_space_guard
from infra.layout import AttemptPaths, Layout
from infra.publishing import target_damage
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, WorkspaceError
from refiner_core.contract.plan import STAGE_VERSIONS, PlannedStage
from refiner_core.contract.records import (
    RECORD_VERSION,
    Attempt,
    Outcome,
    RunRecord,
    StageRecord,
    StageResult,
    StageSpec,
    from_json,
    to_json,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Raised when an older refiner would misread the folder.
FORMAT = 1


def now_text() -> str:
    """The time for people (UTC, ISO 8601). Never compared with another node's."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Claim:
    """What an orchestrator says when it takes a stage.

    ``after`` is the number of the newest attempt that it has seen (0: none); the claim fails if
    another one has come since.
    """

    owner: str
    executor: str
    after: int = 0


class Workspace:
    """A workspace folder.

    Open it with :meth:`open` to work in it or with :meth:`read_only` to look (a missing folder is
    an empty workspace then, and nothing is ever written).
    """

    def __init__(self, root: Path, data_root: Path | None = None) -> None:
        self.root = root.expanduser().absolute()
        self.layout = Layout(self.root, (data_root or self.root).expanduser().absolute())

    # ------------------------------------------------------------ opening

    @classmethod
    def open(cls, root: Path | str) -> Workspace:
        """The workspace at ``root``, created if absent.

        Raises
        ------
        WorkspaceError
            Not a folder, not writable, or of a newer format.
        NoSpaceError
            There is no room for even a small file.
        """
        self = cls(Path(root))
        self._check_format()
        try:
            for folder in (self.layout.stages, self.layout.runs, self.layout.code):
                folder.mkdir(parents=True, exist_ok=True)
            if not self.layout.format_file.exists():
                atomic.create_json(self.layout.format_file, {"format": FORMAT, "made": now_text()})
            if not has_room(self.root, 4096):
                raise no_space_error(self.root, "opening the workspace")
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "not writable", str(self.root))
        except OSError as error:
            raise self._open_error(error) from error
        return self

    @classmethod
    def read_only(cls, root: Path | str) -> Workspace:
        """The workspace at ``root`` for reading; it need not exist.

        Raises
        ------
        WorkspaceError
            It is not a folder, or of a newer format.
        """
        self = cls(Path(root))
        self._check_format()
        return self

    def _check_format(self) -> None:
        if self.root.exists() and not self.root.is_dir():
            raise WorkspaceError(
                f"The workspace {self.root} is not a folder",
                expected="a folder, or a path that does not exist yet",
                fix="name another one with `workspace=DIR`",
            )
        found = self._read(self.layout.format_file)
        number = found.get("format") if isinstance(found, dict) else None
        if found is not None and not isinstance(number, int):
            raise WorkspaceError(
                f"{self.layout.format_file} names no format",
                expected=f'{{"format": {FORMAT}}}',
                fix="restore the file, or name another folder with `workspace=DIR`",
            )
        if isinstance(number, int) and number > FORMAT:
            raise WorkspaceError(
                f"The workspace {self.root} has format {number}",
                expected=f"format {FORMAT} or older, which this version of refiner knows",
                fix="use the refiner that made it or a newer one, or another `workspace=DIR`",
            )

    def _open_error(self, error: OSError) -> OSError:
        if isinstance(error, WorkspaceError) or getattr(error, "resumable", False):
            return error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return no_space_error(self.root, "opening the workspace", error)
        return WorkspaceError(
            f"The workspace {self.root} cannot be used: {error.strerror or error}",
            expected="a folder in which you may create files",
            fix="correct its permissions, or name another one with `workspace=DIR`",
        )

    # ------------------------------------------------------------ stages

    def read_record(self, stage_id: str) -> StageRecord | None:
        """All that is known of a stage; None if nobody ever claimed it."""
        paths = self.layout.stage(stage_id)
        numbers = paths.attempt_numbers()
        spec = self._load(StageSpec, paths.spec)
        if spec is None and numbers:  # the specification is written before the first attempt
            raise WorkspaceError(
                f"{paths.control} has attempts, but no {paths.spec.name}",
                expected="folders that refiner has made",
                fix=self._way_out(paths.spec),
            )
        if spec is None:
            return None
        # Attempts first: a result that lands in between then only shows too little, not too much.
        found = {n: self.read_attempt(stage_id, n) for n in numbers}
        result = self._load(StageResult, paths.result)
        attempts = tuple(a for a in found.values() if a is not None)
        if result is None and len(attempts) < len(found):
            number = next(n for n, a in found.items() if a is None)
            raise WorkspaceError(
                f"{paths.attempt(number).control} has no {paths.attempt(number).intent.name}",
                expected="folders that refiner has made",
                fix="delete that folder",
            )
        if result is not None:
            attempts = tuple(_succeeded(a, result) for a in attempts)
        return StageRecord(spec, attempts, result)

    def read_attempt(self, stage_id: str, number: int) -> Attempt | None:
        """One attempt, put together from the files of its several writers."""
        paths = self.layout.attempt(stage_id, number)
        attempt = self._load(Attempt, paths.intent)
        if attempt is None:
            return None
        job = self._read(paths.job) or {}
        started = self._read(paths.started) or {}
        ended = self._read(paths.outcome) or {}
        resumed = self._read(paths.resumed) or {}
        outcome = ended.get("outcome")
        return replace(
            attempt,
            job_id=job.get("job_id"),
            started_at=None if started.get("void") else started.get("started_at"),
            ended_at=ended.get("ended_at"),
            resumed_from_step=resumed.get("step"),
            outcome=None if outcome is None else from_json(Outcome, outcome),
        )

    def read_result(self, stage_id: str) -> StageResult | None:
        """The result of a finished stage."""
        return self._load(StageResult, self.layout.stage(stage_id).result)

    def output_dir(self, stage_id: str) -> Path | None:
        """Where a finished stage's output lies; None if it is not done."""
        result = self.read_result(stage_id)
        return None if result is None else self.layout.stage(stage_id).data / result.output_dir

    def output_damage(self, stage_id: str) -> str | None:
        """What is wrong with a finished stage's output; None if all is there.

        Looks at names and sizes only, so that it costs nothing beside reading the files.
        """
        folder, result = self.output_dir(stage_id), self.read_result(stage_id)
        if folder is None or result is None:
            return None
        for file in result.files:
            path = folder / file.path
            try:
                size = path.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return f"{path} is gone"
            if size != file.bytes:
                return f"{path} has {size} bytes instead of {file.bytes}"
        is_published = stage_id.startswith(("publish-", "card-"))
        return target_damage(result.report) if is_published else None

    def check_output(self, stage_id: str) -> None:
        """Refuse to read an output that is not what the stage has left.

        Raises
        ------
        WorkspaceError
            A file of it is gone or cut short.
        """
        if damage := self.output_damage(stage_id):
            raise WorkspaceError(
                f"{damage}, though {stage_id} is done",
                expected="the output of a finished stage as it was left",
                fix=self._way_out(self.layout.stage(stage_id).result),
            )

    def stage_ids(self) -> list[str]:
        """All stages that were ever claimed here."""
        try:
            return sorted(p.name for p in self.layout.stages.iterdir() if p.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def claim_attempt(
        self, stage: PlannedStage, config: RecipeConfig, inputs: Mapping[str, str], claim: Claim
    ) -> Attempt | None:
        """Take the next attempt at a stage; None if another orchestrator was faster.

        ``inputs`` maps roles to stage ids. The attempt's folder is prepared under a temporary name
        and renamed, so whoever sees it sees the unique comment and the owner too.

        Raises
        ------
        NoSpaceError
            The small files did not fit.
        """
        number = claim.after + 1
        paths = self.layout.stage(stage.id)
        attempt = Attempt(
            number=number,
            comment=f"refiner-{stage.id}-{number:04d}-{secrets.token_hex(6)}",
            executor=claim.executor,
            owner=claim.owner,
            claimed_at=now_text(),
        )
        with no_space_guard(self.root, f"claiming {stage.title}"):
            paths.attempts.mkdir(parents=True, exist_ok=True)
            self._write_spec(stage)
            files = {"intent": attempt, "config": config, "inputs": inputs}
            won = self._rename_in(paths.attempt(number), files)
        if not won or max(paths.attempt_numbers()) != number:
            return None
        if paths.result.exists():  # it became done between the caller's look and now
            self.close_attempt(stage.id, number, Outcome("none", "finish", "was done already"))
            return None
        return attempt

    def _rename_in(self, target: AttemptPaths, files: Mapping[str, Any]) -> bool:
        temporary = atomic.temporary_name(target.control)
        try:
            temporary.mkdir()
            for name, value in files.items():
                atomic.write_json(temporary / f"{name}.json", to_json(value))
            try:
                temporary.rename(target.control)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        atomic.sync_folder(target.control.parent)
        # Not the rename's own word: NFS may repeat a request and report on the second one.
        found = self._read(target.intent) or {}
        return bool(found.get("comment") == files["intent"].comment)

    def _write_spec(self, stage: PlannedStage) -> None:
        spec = StageSpec(
            version=RECORD_VERSION,
            name=stage.name,
            kind=stage.kind,
            fingerprint=stage.fingerprint,
            model=stage.model,
            stage_version=STAGE_VERSIONS[stage.kind],
            identity=stage.identity,
            sources=stage.sources,
            input_fingerprints=stage.input_fingerprints,
        )
        path = self.layout.stage(stage.id).spec
        if not path.exists():
            atomic.create_json(path, to_json(spec))

    def start_attempt(self, stage_id: str, number: int, value: Mapping[str, Any]) -> bool:
        """Take the token that lets an attempt run. False: it was taken or given up before."""
        return atomic.create_json(self.layout.attempt(stage_id, number).started, dict(value))

    def void_attempt(self, stage_id: str, number: int) -> bool:
        """Give up an attempt that never started, so that a late job of it cannot start any more.

        False if it has started after all.
        """
        if self.start_attempt(stage_id, number, {"void": True, "at": now_text()}):
            return True
        started = self._read(self.layout.attempt(stage_id, number).started) or {}
        return bool(started.get("void"))

    def close_attempt(
        self, stage_id: str, number: int, outcome: Outcome, seconds: float | None = None
    ) -> bool:
        """Write how an attempt ended; False if somebody had written it before."""
        value = {"outcome": to_json(outcome), "ended_at": now_text(), "seconds": seconds}
        return atomic.create_json(self.layout.attempt(stage_id, number).outcome, value)

    def publish_result(self, stage_id: str, result: StageResult) -> bool:
        """Make a stage done; False if it was done before."""
        return atomic.create_json(self.layout.stage(stage_id).result, to_json(result))

    def is_stale(self, stage_id: str, number: int) -> bool:
        """Whether an attempt may no longer make anything visible: a later one exists, or someone
        has closed it."""
        paths = self.layout.stage(stage_id)
        newest = max(paths.attempt_numbers(), default=0)
        return newest > number or paths.attempt(number).outcome.exists()

    # ------------------------------------------------------------ runs

    def new_run_id(self, recipe: str) -> str:
        """A fresh id that sorts by time: ``20261121-153012-tiny-3f2a`` (UTC). Makes its folder."""
        name = "".join(c if c.isalnum() or c in "-_" else "-" for c in recipe)[:40] or "run"
        with no_space_guard(self.root, "starting a run"):
            while True:
                stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
                run_id = f"{stamp}-{name}-{secrets.token_hex(2)}"
                try:
                    self.layout.run(run_id).folder.mkdir(parents=True)
                except FileExistsError:
                    continue
                return run_id

    def write_run(self, run: RunRecord) -> None:
        """Record a call."""
        paths = self.layout.run(run.run)
        with no_space_guard(self.root, "recording the run"):
            paths.folder.mkdir(parents=True, exist_ok=True)
            atomic.write_json(paths.record, to_json(run))

    def read_run(self, run_id: str) -> RunRecord:
        """One call.

        Raises
        ------
        ConfigurationError
            There is none of that id.
        """
        run = self._load(RunRecord, self.layout.run(run_id).record)
        if run is None:
            raise ConfigurationError(
                f"{self.root} has no run {run_id!r}",
                expected=f"one of: {', '.join(self.run_ids()[-5:]) or '(there are none)'}",
                fix="name one of these, or another `workspace=DIR`",
            )
        return run

    def run_ids(self) -> list[str]:
        """All recorded calls, oldest first."""
        try:
            names = [p.name for p in self.layout.runs.iterdir() if (p / "run.json").exists()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(names)

    # ------------------------------------------------------------ reading

    def read_heartbeat(self, stage_id: str, number: int) -> dict[str, Any] | None:
        """The newest heartbeat of an attempt; None where there is none that can be read.

        It is the one file that is not made durable, so a power cut may leave it empty.
        """
        try:
            return self._read(self.layout.attempt(stage_id, number).heartbeat)
        except WorkspaceError as error:
            log.warning("%s", error)
            return None

    def read_control(self, path: Path) -> dict[str, Any] | None:
        """A small JSON object of this workspace; None if it is not there."""
        return self._read(path)

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            value = atomic.read_json(path)
        except (ValueError, OSError) as error:
            raise WorkspaceError(
                f"{path} cannot be read: {error}",
                expected="a JSON file that refiner has written",
                fix=self._way_out(path),
            ) from error
        return value if isinstance(value, dict) or value is None else {"value": value}

    def _way_out(self, path: Path) -> str:
        """What to do about a damaged file: the smallest folder that can go, and what that means."""
        for root, meaning in (
            (self.layout.stages, "the same command then makes the stage again"),
            (self.layout.runs, "stages and their results stay, only that call is forgotten"),
        ):
            if path.is_relative_to(root):
                return f"restore it, or delete {root / path.relative_to(root).parts[0]}: {meaning}"
        return "restore it, or name another folder with `workspace=DIR`"

    def _load(self, kind: type[T], path: Path) -> T | None:
        data = self._read(path)
        if data is None:
            return None
        version = data.get("version", 0)
        if isinstance(version, int) and version > RECORD_VERSION:
            raise WorkspaceError(
                f"{path} has version {version}",
                expected=f"version {RECORD_VERSION} or older",
                fix="use the refiner that wrote it, or a newer one",
            )
        try:
            return from_json(kind, data)
        except (TypeError, AttributeError, KeyError) as error:
            raise WorkspaceError(
                f"{path} is not a {kind.__name__}: {error}",
                expected="a file that refiner has written",
                fix=self._way_out(path),
            ) from error


def _succeeded(attempt: Attempt, result: StageResult) -> Attempt:
    """The result is written before the outcome and says as much; a kill may come in between."""
    if attempt.number != result.attempt or attempt.outcome is not None:
        return attempt
    return replace(attempt, outcome=Outcome("none", "finish"), ended_at=result.finished_at)
