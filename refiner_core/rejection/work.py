"""Batches of attempts one after the other, from the newest checkpoint on.

In: prompts, a lane that samples and scores, a stage's IO. Out: one file of attempts per batch.

A batch is whole prompts: ``sample.generation_batch_size`` attempts, and at least one prompt's. Once
all of it is scored its prompts' attempts are chosen, and it is a file that every later checkpoint
has (as a hard link, where the file system knows these). While a judge works on one batch the next
one is sampled; its attempts are kept in a file of their own as soon as all are there. So what an
interruption costs is the sampling of one batch at most, and with ``sample.save_freq`` above 1 of as
many; of episodes that may be kept one by one, what ended in the last minute.

Steps of metrics and checkpoints count saves and finished batches in the order in which they come;
without a judge that streams they are the numbers of batches.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from refiner_core.contract.config import SampleConfig
from refiner_core.contract.errors import DamagedCheckpoint, EnvironmentOutage, Interrupted
from refiner_core.contract.types import (
    Judge,
    JudgeUsage,
    PromptRow,
    SavedCheckpoint,
    StageIO,
)
from refiner_core.generation.reporting import BatchReporter
from refiner_core.judges.usage import (
    usage_between,
    usage_from_json,
    usage_of,
    usage_sum,
    usage_to_json,
)
from refiner_core.rejection.attempts import Attempt, Key, load_attempts, write_attempts
from refiner_core.rejection.lane import Begun, Lane, PartlyDone
from refiner_core.rejection.report import batch_metrics
from refiner_core.rejection.selection import choose

Batch = tuple[PromptRow, ...]
#: Where a batch may be kept in parts, that is done about so often, seconds.
KEEP_EVERY_S = 60.0
_USAGE_FILE = "judge.json"
_DONE, _WAITING = "batch", "waiting"


def batches_of(prompts: Sequence[PromptRow], rule: SampleConfig) -> list[Batch]:
    """All work, in order."""
    size = max(1, rule.generation_batch_size // rule.attempts)
    return [tuple(prompts[first : first + size]) for first in range(0, len(prompts), size)]


class Work:
    """All batches.

    Parameters
    ----------
    folder
        Where the files of batches lie meanwhile; what is in it is replaced.
    """

    def __init__(
        self,
        rule: SampleConfig,
        batches: Sequence[Batch],
        lane: Lane,
        judge: Judge | None,
        io: StageIO,
        reporter: BatchReporter,
        folder: Path,
    ) -> None:
        self.rule, self.batches, self.lane, self.judge = rule, batches, lane, judge
        self.io, self.reporter, self.folder = io, reporter, folder
        self.step = self.done = 0
        self._saved_step, self._saved_at_done, self._saved_s = 0, 0, time.monotonic()
        self._waiting: dict[int, tuple[Attempt, ...]] = {}
        self._usage_before: JudgeUsage | None = None
        self._spent: dict[int, tuple[int, float]] = {}  # batch: tokens sampled now, seconds
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._restore()
        self._usage_at_start = None if judge is None else usage_of(judge)

    @property
    def files(self) -> list[Path]:
        """The files of finished batches, in order."""
        return [self.folder / _name(_DONE, number) for number in range(1, self.done + 1)]

    @property
    def usage(self) -> JudgeUsage | None:
        """What the judge has done for this stage; None where it keeps no count."""
        now = None if self.judge is None else usage_of(self.judge)
        if self._usage_at_start is None or now is None:
            return self._usage_before
        used = usage_between(self._usage_at_start, now)
        return usage_sum(self._usage_before, used) if self._usage_before else used

    def run(self) -> None:
        """Every batch that is left.

        Raises
        ------
        Interrupted
            A stop was asked for; what is finished is kept.
        """
        begun: Begun | None = None
        for number in range(self.done + 1, len(self.batches) + 1):
            if self.io.should_stop():
                self._finish(begun)
                self._stop()
            self.reporter.batch(self.done, "sample")
            before, begun = begun, self._begin(number)
            self._finish(before)
            if not begun.judging or number == len(self.batches):
                self._finish(begun)
                begun = None

    def _begin(self, number: int) -> Begun:
        """A batch that is sampled: by an earlier attempt of the stage, or now."""
        known = self._waiting.get(number, ())
        started = time.perf_counter()
        try:
            begun = self.lane.begin(
                *(self.batches[number - 1], known, self.reporter.step, self.io.should_stop),
                partial(self._keep, number),
            )
        except PartlyDone as cut:
            self._wait_with(number, cut.attempts)
            if isinstance(cut.why, Interrupted):
                self._stop(len(cut.attempts))
            self._save()
            raise cut.why from None
        tokens = sum(a.sampled_tokens for a in begun.attempts)
        tokens -= sum(a.sampled_tokens for a in known)
        self._spent[number] = (tokens, time.perf_counter() - started)
        if len(known) < len(begun.attempts) and begun.judging:
            self._wait_with(number, begun.attempts)  # else it is scored within the moment
            self._save()
        return begun

    def _keep(self, number: int, attempts: Mapping[Key, Attempt]) -> None:
        """Parts of a batch survive from time to time, where they may."""
        if time.monotonic() - self._saved_s >= KEEP_EVERY_S:
            self._wait_with(number, sorted(attempts.values(), key=lambda attempt: attempt.key))
            self._save()

    def _finish(self, begun: Begun | None) -> None:
        """Wait for a batch's scores, choose, and keep it."""
        if begun is None:
            return
        number = self.done + 1
        try:
            scored = begun.finish(self.reporter.judged)
        except EnvironmentOutage:
            if self.lane.keeps_parts:
                self._wait_with(number, begun.attempts)
                self._save()
            raise
        chosen = self._chosen(scored)
        write_attempts(self.folder / _name(_DONE, number), chosen)
        self._waiting.pop(number, None)
        (self.folder / _name(_WAITING, number)).unlink(missing_ok=True)
        self.done, self.step = number, self.step + 1
        tokens, seconds = self._spent.pop(number)
        speed = {"tokens_per_second": tokens / seconds} if tokens and seconds else {}
        times = {"time/generate_s": seconds, **speed}
        self.io.log_metrics(self.step, batch_metrics(number, chosen) | times)
        if self.done - self._saved_at_done >= self.rule.save_freq and number < len(self.batches):
            self._save()

    def _chosen(self, scored: Sequence[Attempt]) -> list[Attempt]:
        size = self.rule.attempts
        groups = [scored[first : first + size] for first in range(0, len(scored), size)]
        return [
            attempt.chosen(choice)
            for group in groups
            for attempt, choice in zip(
                group, choose([a.candidate for a in group], self.rule), strict=True
            )
        ]

    # ------------------------------------------------------------ what survives

    def _stop(self, partly: int = 0) -> NoReturn:
        """End, with all that is finished on the disk."""
        if self.done > self._saved_at_done or partly:
            self._save()
        also = f" and {partly} attempts of the next one" if partly else ""
        raise Interrupted(
            f"Sampling stopped after {self.done} of {len(self.batches)} batches{also}",
            fix="run the same command again to go on",
        )

    def _wait_with(self, number: int, attempts: Sequence[Attempt]) -> None:
        """Note what there is of a batch; what errors have ended is tried again."""
        self._waiting[number] = tuple(a for a in attempts if a.status != "error")
        write_attempts(self.folder / _name(_WAITING, number), self._waiting[number])

    def _save(self) -> None:
        """A checkpoint: links to all files of batches."""
        if self.step <= self._saved_step:
            self.step += 1
        with self.io.new_checkpoint(self.step) as folder:
            for path in sorted(self.folder.glob("*.parquet")):
                _link(path, folder / path.name)
            if (usage := self.usage) is not None:
                text = json.dumps(usage_to_json(usage))
                (folder / _USAGE_FILE).write_text(text, encoding="utf-8")
        self._saved_step, self._saved_at_done = self.step, self.done
        self._saved_s = time.monotonic()

    def _restore(self) -> None:
        while (checkpoint := self.io.latest_checkpoint()) is not None:
            try:
                self._restore_from(checkpoint)
            except DamagedCheckpoint as error:
                self.io.pass_over(checkpoint, error.what)
                self._waiting.clear()
                for path in self.folder.iterdir():
                    path.unlink()
            else:
                return

    def _restore_from(self, checkpoint: SavedCheckpoint) -> None:
        numbers = range(1, len(self.batches) + 1)
        done = [n for n in numbers if (checkpoint.path / _name(_DONE, n)).exists()]
        if done != list(range(1, len(done) + 1)):
            raise DamagedCheckpoint(
                f"{checkpoint.path} lacks batches before the {max(done)}th",
                expected="all batches up to its last",
                fix="nothing; the checkpoint before it is gone on from",
            )
        for number in numbers:
            path = checkpoint.path / _name(_WAITING, number)
            if path.exists():
                self._waiting[number] = tuple(load_attempts(path))
                _link(path, self.folder / path.name)
        for number in done:
            path = checkpoint.path / _name(_DONE, number)
            _link(path, self.folder / path.name)
        self.step = self._saved_step = checkpoint.step
        self.done = self._saved_at_done = len(done)
        usage = checkpoint.path / _USAGE_FILE
        if usage.exists():
            self._usage_before = usage_from_json(json.loads(usage.read_text(encoding="utf-8")))


def _name(what: str, number: int) -> str:
    return f"{what}-{number:06d}.parquet"


def _link(source: Path, target: Path) -> None:
    """One file under two names; a copy where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
