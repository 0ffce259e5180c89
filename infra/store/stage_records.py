"""Records of stages: their definitions, owners, attempts with outcomes, and results.

In: planned stages, results, outcomes. Out: :class:`StageRecord` values. Files with several
potential writers (a claim, a start, an outcome, a result) are created exclusively, so exactly one
wins. The evidence file of a published folder, ``refiner.json``, names refiner's files in it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from infra.host.files import again, exists, is_folder, make_folder, names_in, opens
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.checkpoints import MARKER, hash_of, reclaimed_text, size_damage
from infra.store.layout import Layout
from infra.store.records import DAMAGED_FILE, RecordFiles, now_text
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import (
    RECORD_VERSION,
    Attempt,
    AttemptOutcome,
    OutputFile,
    StageRecord,
    StageResult,
    StageSpec,
    from_json,
    picked,
    to_json,
)

#: The file in every publication that lists its files and the facts of its card.
EVIDENCE = "refiner.json"
CARD = "README.md"
KIND = "refiner publication"
_PAPERS = (CARD, EVIDENCE)


@dataclass(frozen=True)
class PublishedState:
    """A publication made by refiner.

    Attributes
    ----------
    step, fingerprint
        Those of its weights.
    files
        Without the card and the evidence file, which change as evaluations finish.
    """

    step: int
    fingerprint: str
    files: tuple[OutputFile, ...]

    @property
    def names(self) -> frozenset[str]:
        """All files that refiner has published there."""
        return frozenset({CARD, EVIDENCE, *(f.path for f in self.files)})


def read_evidence(text: str | bytes | None) -> PublishedState | None:
    """Contents of an evidence file; None if there is none, or it is not refiner's."""
    try:
        said: Any = json.loads(text or "null")
        ours = isinstance(said, dict) and said.get("kind") == KIND
        return from_json(PublishedState, said) if ours else None
    except (ValueError, TypeError):
        return None


def published_at(place: Path) -> PublishedState | None:
    """Refiner's publication at a place; None if there is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return read_evidence(again((place / EVIDENCE).read_bytes))
    return None


def target_damage(report: Mapping[str, Any]) -> str | None:
    """Difference between a target and what a publish or card stage put there; None if there is
    none.

    A Hub is not queried: nothing is known to be gone. A folder is judged by its own manifest. Card
    and evidence are replaced by later stages of the same publication, so their content is checked
    only if a report has no other files.
    """
    if "target" not in report or report.get("where", "folder") != "folder":
        return None
    target = Path(str(report["target"]))
    weights = [f for f in report.get("files", ()) if f["path"] not in _PAPERS]
    wanted = {f["path"]: f["sha256"] for f in weights}
    if not wanted:
        wanted[CARD] = hashlib.sha256(str(report["card"]).encode()).hexdigest()
    try:
        for path in (target, *(target / name for name in wanted), target / CARD):
            if not exists(path):
                return f"{path} is gone"
        published_state = published_at(target)
        there = {f.path: f.sha256 for f in published_state.files} if published_state else {}
        if CARD in wanted:
            there[CARD] = hash_of(target / CARD)
    except (OSError, ValueError) as error:
        return f"{target} cannot be read ({error})"
    for name, digest in wanted.items():
        if there.get(name) != digest:
            return f"{target / name} has been replaced by another publication"
    return next(filter(None, (size_damage(target / f["path"], f["bytes"]) for f in weights)), None)


@dataclass(frozen=True)
class StageClaim:
    """Claim of an orchestrator on a stage.

    ``after`` is the number of the newest attempt that it has seen (0: none); the claim fails if
    there is another one since. ``apart``: the code of the job is of a version that reads
    configuration and inputs from separate files.
    """

    owner: str
    executor: str
    after: int = 0
    apart: bool = False


class StageRecords(RecordFiles):
    """The part of a workspace with stages and attempts."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        # Cache of ended attempts with a successor: they never change again.
        self._over: dict[tuple[str, int], Attempt] = {}

    # ------------------------------------------------------------ reading

    def read_record(self, stage_id: str) -> StageRecord | None:
        """The record of a stage; None if it was never claimed."""
        paths = self.layout.stage(stage_id)
        numbers = paths.attempt_numbers()
        spec = self.load(StageSpec, paths.spec)
        if spec is None and numbers:  # the specification is written before the first attempt
            raise _incomplete(paths.control, paths.spec.name, self._way_out(paths.spec))
        if spec is None:
            return None
        # Attempts first: a result that lands in between then shows too little, not too much.
        found = {n: self.read_attempt(stage_id, n) for n in numbers}
        result = self.load(StageResult, paths.result)
        attempts = tuple(a for a in found.values() if a is not None)
        if result is None and len(attempts) < len(found):
            lost = paths.attempt(next(n for n, a in found.items() if a is None))
            raise _incomplete(lost.control, lost.intent.name, "delete that folder")
        if result is not None:  # it is written before the outcome; a kill may come in between
            end, at = AttemptOutcome("none", "finish"), result.finished_at
            attempts = tuple(
                replace(a, outcome=end, ended_at=at)
                if a.number == result.attempt and a.outcome is None
                else a
                for a in attempts
            )
        return StageRecord(spec, attempts, result)

    def read_attempt(self, stage_id: str, number: int) -> Attempt | None:
        """One attempt, combined from the files of its several writers."""
        if kept := self._over.get((stage_id, number)):
            return kept
        attempt = self._read_attempt(stage_id, number)
        newer = self.layout.attempt(stage_id, number + 1).control
        if attempt is not None and attempt.outcome is not None and exists(newer):
            self._over[stage_id, number] = attempt  # it has no writer any more
        return attempt

    def _read_attempt(self, stage_id: str, number: int) -> Attempt | None:
        paths = self.layout.attempt(stage_id, number)
        intent = self.read_or_set_aside(paths.intent, lambda v: from_json(Attempt, v))
        job = self.read_or_set_aside(paths.job, _restart) or {}
        started = self.read_or_set_aside(paths.started, _restart) or {}
        ended = self.read_or_set_aside(paths.outcome, _outcome) or {}
        if intent is None and not ended and not (ended := self._give_up_unknown(stage_id, number)):
            return None
        attempt = from_json(Attempt, intent) if intent else Attempt(number, "", "", "", "")
        outcome = ended.get("outcome")
        seconds = ended.get("seconds")
        if outcome is not None and seconds is None:  # taken from its last heartbeat instead
            seconds = (self.read_heartbeat(stage_id, number) or {}).get("seconds")
        node = started.get("node") or self.part(paths, "scheduler", job).get("node")
        return replace(
            attempt,
            job_id=job.get("job_id"),
            started_at=None if started.get("void") else started.get("started_at"),
            ended_at=ended.get("ended_at"),
            resumed_from_step=self.part(paths, "resumed", started).get("step"),
            outcome=_outcome(ended) if ended else None,
            restart=_restart(started) or _restart(job),
            node=str(node or ""),
            seconds=seconds,
            has_room=attempt.has_room and opens(paths.room),
        )

    def _give_up_unknown(self, stage_id: str, number: int) -> dict[str, Any]:
        """End an attempt with a lost claim, whose owner and job are unknown: if its worker lives,
        it exits at its next check. Empty if the attempt was never claimed."""
        paths = self.layout.attempt(stage_id, number)
        if not any(name.startswith(paths.intent.name) for name in names_in(paths.control)):
            return {}
        outcome = AttemptOutcome("killed", "resume", f"its {paths.intent.name} was damaged")
        if self.sets_aside:
            self.close_attempt(stage_id, number, outcome)
        return {"outcome": to_json(outcome)}

    def read_result(self, stage_id: str) -> StageResult | None:
        """The result of a finished stage."""
        return self.load(StageResult, self.layout.stage(stage_id).result)

    def output_dir(self, stage_id: str) -> Path | None:
        """Folder of a finished stage's output; None if it is not done."""
        result = self.read_result(stage_id)
        return None if result is None else self.layout.stage(stage_id).data / result.output_dir

    def output_damage(self, stage_id: str) -> str | None:
        """Damage to a finished stage's output; None if it is complete.

        Checks names and sizes only, so that it is cheap.
        """
        if (result := self.read_result(stage_id)) is None:
            return None
        folder = self.layout.stage(stage_id).data / result.output_dir
        for file in result.files:
            if damage := size_damage(folder / file.path, file.bytes):
                is_gone = damage.endswith(" is gone")
                why = reclaimed_text(self.layout.stage(stage_id)) if is_gone else None
                return f"{damage}: {why}" if why else damage
        for fetched in result.report.get("fetched", ()) if stage_id.startswith("fetch-") else ():
            if not is_folder(Path(fetched["folder"])):
                return f"{fetched['folder']} is gone"
        is_published = stage_id.startswith(("publish-", "card-"))
        return target_damage(result.report) if is_published else None

    def check_output(self, stage_id: str) -> None:
        """Refuse to read an output that differs from what the stage wrote.

        Raises
        ------
        WorkspaceError
            A file of it is gone or truncated.
        """
        if damage := self.output_damage(stage_id):
            raise WorkspaceError(
                f"{damage}, though {stage_id} is done",
                expected="the output of a finished stage as it was written",
                fix=self._way_out(self.layout.stage(stage_id).result),
            )

    def has_damaged(self, stage_id: str) -> bool:
        """Tell whether a damaged file of one of the stage's attempts was set aside."""
        paths = self.layout.stage(stage_id)
        folders = (paths.attempt(number).control for number in paths.attempt_numbers())
        return any(DAMAGED_FILE in name for folder in folders for name in names_in(folder))

    def stage_ids(self) -> list[str]:
        """All stages that were ever claimed here."""
        folder = self.layout.stages
        return [name for name in names_in(folder) if is_folder(folder / name)]

    def claim_attempt(
        self,
        stage: PlannedStage,
        config: RecipeConfig,
        inputs: Mapping[str, str],
        claim: StageClaim,
    ) -> Attempt | None:
        """Take the next attempt at a stage; None if another orchestrator was faster.

        ``inputs`` maps roles to stage ids. The attempt's folder is prepared under a temporary name
        and renamed, so it is never visible without its unique comment and owner.

        Raises
        ------
        NoSpaceError
            The small files did not fit.
        """
        number = claim.after + 1
        paths = self.layout.stage(stage.id)
        if exists(paths.result):
            return None  # it is done by now, or its result could not be read
        attempt = Attempt(
            number=number,
            comment=f"refiner-{stage.id}-{number:04d}-{secrets.token_hex(6)}",
            executor=claim.executor,
            owner=claim.owner,
            claimed_at=now_text(),
            has_room=True,
        )
        spec = StageSpec(
            version=RECORD_VERSION,
            stage_version=stage.version,
            **picked(stage, "name", "kind", "fingerprint", "model"),
            **picked(stage, "identity", "sources", "input_fingerprints"),
        )
        with no_space_guard(self.root, f"claiming {stage.title}"):
            make_folder(paths.attempts)
            if not exists(paths.spec):
                atomic.create_json(paths.spec, to_json(spec))
            said = {"config": to_json(config), "inputs": dict(inputs)}
            return self._claim(stage.id, attempt, said, said if claim.apart else {})

    def claim_restart(self, stage_id: str, before: int, job: Mapping[str, Any]) -> Attempt | None:
        """Take the attempt after ``before`` for the same job, which the scheduler has restarted;
        None if another process was faster.

        All but the number is as in the attempt before: same job, same owner.

        Parameters
        ----------
        stage_id, before
            The newest attempt, which has ended.
        job
            Content of ``job.json`` in addition to that of the attempt before.

        Raises
        ------
        NoSpaceError
            The small files did not fit.
        """
        old = self.layout.attempt(stage_id, before)
        intent = self.load(Attempt, old.intent)
        if intent is None:
            return None
        attempt = replace(intent, number=before + 1, claimed_at=now_text(), has_room=True)
        said = {"config": self.part(old, "config"), "inputs": self.part(old, "inputs")}
        # The scheduler's facts are of the start that has ended.
        kept = {k: v for k, v in (self.read_control(old.job) or {}).items() if k != "scheduler"}
        if batch := self.part(old, "batch"):
            kept["batch"] = batch
        with no_space_guard(self.root, f"claiming {stage_id} again"):
            return self._claim(stage_id, attempt, said, {"job": {**kept, **job}})

    def _claim(
        self, stage_id: str, attempt: Attempt, said: Mapping[str, Any], files: Mapping[str, Any]
    ) -> Attempt | None:
        paths, target = self.layout.stage(stage_id), self.layout.attempt(stage_id, attempt.number)
        temporary = atomic.temporary_name(target.control)
        intent = {**to_json(attempt), **said, "claim": secrets.token_hex(8)}
        try:
            temporary.mkdir()
            (temporary / target.room.name).touch()
            for name, value in files.items():
                atomic.write_json(temporary / f"{name}.json", value)
            atomic.write_json(temporary / target.intent.name, intent)
            try:
                temporary.rename(target.control)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        atomic.settle_folder(target.control.parent)
        # Not the rename's own result: NFS may repeat a request and report on the second one.
        won = (self.read_control(target.intent) or {}).get("claim") == intent["claim"]
        if not won or max(paths.attempt_numbers(), default=0) != attempt.number:
            return None
        if exists(paths.result):  # it became done since the caller's check
            done = AttemptOutcome("none", "finish", "was done already")
            self.close_attempt(stage_id, attempt.number, done)
            return None
        return attempt

    def start_attempt(self, stage_id: str, number: int, value: Mapping[str, Any]) -> bool:
        """Take the token that lets an attempt run. False: it was taken or given up before."""
        return atomic.create_json(self.layout.attempt(stage_id, number).started, dict(value))

    def void_attempt(self, stage_id: str, number: int) -> bool:
        """Give up an attempt that never started, so that a late job of it cannot start any more.

        False if it has started after all.
        """
        if self.start_attempt(stage_id, number, {"void": True, "at": now_text()}):
            return True
        started = self.read_control(self.layout.attempt(stage_id, number).started) or {}
        return bool(started.get("void"))

    def close_attempt(
        self, stage_id: str, number: int, outcome: AttemptOutcome, seconds: float | None = None
    ) -> bool:
        """Write how an attempt ended; False if that was written before."""
        value = {"outcome": to_json(outcome), "ended_at": now_text(), "seconds": seconds}
        return atomic.create_json(self.layout.attempt(stage_id, number).outcome, value)

    def publish_result(self, stage_id: str, result: StageResult) -> bool:
        """Make a stage done; False if it was done before."""
        return atomic.create_json(self.layout.stage(stage_id).result, to_json(result))

    def note_space(self, stage_id: str, number: int, *, there: bool) -> None:
        """Record that an attempt has space to write, or (by deleting a file, which works on a full
        disk and on any node) that it has none; OSError if there is no space to record that."""
        path = self.layout.attempt(stage_id, number).room
        if not there:
            path.unlink(missing_ok=True)
        elif not exists(path):
            path.touch()

    def is_stale(self, stage_id: str, number: int) -> bool:
        """Tell whether an attempt may no longer publish files: a later one exists, or it was
        closed."""
        paths = self.layout.stage(stage_id)
        newest = max(paths.attempt_numbers(), default=0)
        return newest > number or exists(paths.attempt(number).outcome)

    def request_stop_of(
        self, stage_id: str, number: int, failure: Literal["interrupted", "cancelled"], reason: str
    ) -> bool:
        """Record why a worker is about to be asked to save and end, before it gets the signal,
        which carries no reason. False if that was recorded before.

        The worker also polls it, so that it ends even where no signal reaches it.
        """
        value = {"reason": reason, "failure": failure, "at": now_text()}
        return atomic.create_json(self.layout.attempt(stage_id, number).stop, value)

    def stop_requested(self, stage_id: str, number: int) -> dict[str, Any] | None:
        """Reason why the worker was asked to end (``reason``, ``failure``); None if it was not."""
        return self.read_control(self.layout.attempt(stage_id, number).stop)

    # ------------------------------------------------------------ facts from other processes

    def note_scheduler(self, stage_id: str, number: int, facts: Mapping[str, str]) -> bool:
        """Record the scheduler's facts about an ended job; False if they were recorded before.

        ``node`` among the facts is where it ran, for an attempt whose worker never recorded it.
        """
        paths = self.layout.attempt(stage_id, number)
        if self.part(paths, "scheduler"):
            return False
        with no_space_guard(self.root, "recording the scheduler's facts"):
            job = self.read_control(paths.job) or {}
            atomic.write_json(paths.job, {**job, "scheduler": dict(facts)})
        return True

    def longest_save_s(self, stage_id: str) -> float:
        """Seconds of the longest save of a checkpoint so far; 0 before the first."""
        paths = self.layout.stage(stage_id)
        steps = [n for n in names_in(paths.checkpoints) if n.startswith("step-")]
        said = [(self.glance(paths.checkpoints / n / MARKER) or {}).get("seconds") for n in steps]
        beats = [self.read_heartbeat(stage_id, n) or {} for n in paths.attempt_numbers()]
        said += [beat.get("save_s") for beat in beats]
        return max((float(s) for s in said if s is not None), default=0.0)

    def read_heartbeat(self, stage_id: str, number: int) -> dict[str, Any] | None:
        """The newest heartbeat of an attempt; None if there is none that can be read.

        It is the only file that is not made durable, so a power cut may leave it empty.
        """
        return self.glance(self.layout.attempt(stage_id, number).heartbeat)


def _incomplete(folder: Path, name: str, fix: str) -> OSError:
    """Error for a folder that lacks a file. A missing mount leaves nothing at all."""
    if not exists(folder):
        return OSError(errno.ENOENT, "Files that were there a moment ago are missing", str(folder))
    return WorkspaceError(
        f"{folder} has no {name}", expected="folders that refiner has made", fix=fix
    )


def _restart(said: Mapping[str, Any]) -> int:
    return int(said.get("restart") or 0)


def _outcome(said: Mapping[str, Any]) -> AttemptOutcome:
    return from_json(AttemptOutcome, said["outcome"])
