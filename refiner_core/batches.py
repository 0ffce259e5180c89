"""Samples made batch by batch, with checkpoints that survive interruptions.

In: batches of :class:`~refiner_core.samples.PlannedSample` samples, and a way to sample and score
one (a subclass of :class:`BatchWork`). Out: a file of rows for each batch, in a separate folder,
and checkpoints of them. Used by rejection sampling and both evaluations.

While a streaming judge finishes a batch, the next one is already sampled. A checkpoint has
``batch-N`` for each finished batch, and ``waiting-N`` for the samples of an unfinished one.
Unreadable files are made again.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from refiner_core.contract.config import RecipeConfig, Resources
from refiner_core.contract.errors import (
    DamagedCheckpoint,
    EnvironmentOutage,
    Interrupted,
    RefinerError,
)
from refiner_core.contract.types import (
    Generator,
    Judge,
    JudgeUsage,
    RewardResult,
    StageIO,
    TurnGenerator,
)
from refiner_core.judges.context import usage_from_json, usage_to_json
from refiner_core.rewards import RewardInput, RewardStream
from refiner_core.samples import BatchReporter, OpenServers, PlannedSample, judge_meter

#: Interval of partial saves of a batch, if it may be saved in parts, seconds.
KEEP_EVERY_S = 60.0
_FOLDER, _USAGE_FILE = ".batches", "judge.json"
_DONE, _WAITING = "batch", "waiting"
#: A sample, and a row of a finished batch.
S = TypeVar("S")


@dataclass(eq=False, kw_only=True)
class BatchWork(ABC, Generic[S]):
    """All batches of a stage, numbered from 1.

    Attributes
    ----------
    generator, tokenizer
        The sampler.
    judge
        Scores answers; its usage is counted (``usage``).
    folder
        Temporary location of the batches' files; existing content is replaced.
    """

    #: Name of the work in errors, and suffix of its files.
    what: ClassVar[str]
    suffix: ClassVar[str] = ".json"

    config: RecipeConfig
    batches: Sequence[Sequence[PlannedSample]]
    generator: Any
    tokenizer: Any
    judge: Judge | None = None
    io: StageIO
    reporter: BatchReporter
    folder: Path

    def __post_init__(self) -> None:
        self.done: set[int] = set()
        self.step = self._saved_step = 0
        self._saved_s = time.monotonic()
        self._unsaved: dict[int, list[S]] = {}
        self._waiting: dict[int, list[S]] = {}
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.usage = judge_meter(self.judge, self._restore())

    # ------------------------------------------------------------ defined by a stage

    @property
    def keeps_parts(self) -> bool:
        """True if samples of an interrupted batch are kept. Otherwise a batch is sampled whole or
        not at all, since only the same batch gives the same bits."""
        return False

    @property
    def save_freq(self) -> int:
        """Batches between checkpoints."""
        return 1

    @abstractmethod
    def key(self, sample: S) -> tuple[str, int]:
        """The :attr:`PlannedSample.key` of a sample."""

    @abstractmethod
    def sample(
        self, number: int, wanted: Sequence[PlannedSample], finished: Callable[[S], None]
    ) -> None:
        """Sample these of a batch; ``finished`` is called for each as it ends."""

    @abstractmethod
    def scored(
        self, number: int, samples: list[S], results: Sequence[RewardResult] | None
    ) -> list[S]:
        """A batch in its stored form; raises if too many samples have no score."""

    def rewards(self, number: int) -> RewardStream | None:
        """Rewards of a batch of answers; None for episodes, which already have rewards."""
        return None

    def answer(self, wanted: PlannedSample, sample: S) -> RewardInput:
        """A sample as input of the reward."""
        raise NotImplementedError

    def failed(self, sample: S) -> bool:
        """True if the infrastructure ended it, so that it is retried."""
        return False

    def tell(self, number: int, finished: int) -> None:
        """Report the number of finished samples of a running batch."""
        if finished:
            self.reporter.step(finished, len(self.batches[number - 1]))
        else:
            self.reporter.batch(len(self.done), "sample")

    def finished(self, number: int, rows: list[S]) -> None:
        """Handle a finished batch."""

    def write(self, path: Path, rows: Sequence[S]) -> None:
        """Write samples to a file."""
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")

    def read(self, path: Path) -> list[S]:
        """Read samples from a file."""
        rows: list[S] = json.loads(path.read_text(encoding="utf-8"))
        return rows

    # ------------------------------------------------------------ results

    def rows(self, number: int) -> list[S]:
        """The rows of a finished batch."""
        if number in self._unsaved:
            return self._unsaved[number]
        return self.read(self._path(self.folder, _DONE, number))

    def run(self) -> None:
        """Make all remaining batches.

        Raises
        ------
        Interrupted
            A stop was requested; finished batches are kept, and the batch being sampled is
            finished.
        """
        judging: list[tuple[int, list[S], RewardStream | None]] = []
        stopped = False
        for number in range(1, len(self.batches) + 1):
            if number in self.done:
                continue
            if stopped := self.io.should_stop():
                break
            judging.append((number, *self._sampled(number)))
            while judging and (len(judging) > 1 or not _streams(judging[0][2])):
                self._finish(*judging.pop(0))
        for one in judging:
            self._finish(*one)
        if stopped:
            self._stop()

    def _sampled(self, number: int) -> tuple[list[S], RewardStream | None]:
        """A sampled batch, from an earlier attempt of the stage or from now; a streaming judge
        starts with each sample as it finishes."""
        self.tell(number, 0)
        wanted, rewards = self.batches[number - 1], self.rewards(number)
        known = self._waiting.get(number, [])
        places = {one.key: place for place, one in enumerate(wanted)}
        made: dict[tuple[str, int], S] = {}

        def there() -> list[S]:
            return [made[key] for key in places if key in made]

        def take(sample: S) -> None:
            key = self.key(sample)
            made[key] = sample
            if rewards is not None:
                rewards.add(places[key], self.answer(wanted[places[key]], sample))

        def finished(sample: S) -> None:
            take(sample)
            self.tell(number, len(made))
            if self.keeps_parts and time.monotonic() - self._saved_s >= KEEP_EVERY_S:
                self._wait_with(number, there())

        for sample in known:
            take(sample)
        try:
            self.sample(number, [one for one in wanted if one.key not in made], finished)
        except RefinerError as error:
            if self.keeps_parts:
                if isinstance(error, Interrupted):
                    self._waiting[number] = there()
                    self._stop(len(made))
                self._wait_with(number, there())
            elif isinstance(error, EnvironmentOutage):
                self._forget_failed()
            raise
        if len(known) < len(made) and _streams(rewards):
            self._wait_with(number, there())  # else scoring is immediate
        return there(), rewards

    def _finish(self, number: int, samples: list[S], rewards: RewardStream | None) -> None:
        """Wait for a batch's scores, and store it."""
        results = None if rewards is None else rewards.results(self.reporter.judged)
        try:
            rows = self.scored(number, samples, results)
        except EnvironmentOutage:
            if self.keeps_parts:
                self._wait_with(number, samples)
            raise
        self._unsaved[number] = rows
        self._waiting.pop(number, None)
        self.done.add(number)
        self.step += 1
        self.finished(number, rows)
        if len(self._unsaved) >= self.save_freq and len(self.done) < len(self.batches):
            self._save()

    # ------------------------------------------------------------ checkpoints

    def _stop(self, partly: int = 0) -> NoReturn:
        """Stop, with all finished work on disk."""
        if self._unsaved or partly:
            self._save()
        also = f" and {partly} samples of the next one" if partly else ""
        raise Interrupted(
            f"{self.what} stopped after {len(self.done)} of {len(self.batches)} batches{also}",
            fix="run the same command again to go on",
        )

    def _wait_with(self, number: int, samples: list[S]) -> None:
        self._waiting[number] = samples
        self._save()

    def _forget_failed(self) -> None:
        """Drop whole batches with failed samples, which would otherwise count against the next
        attempt."""
        bad = {n for n in self.done if any(self.failed(row) for row in self.rows(n))}
        saved = bad - self._unsaved.keys()
        self.done -= bad
        self._unsaved = {n: rows for n, rows in self._unsaved.items() if n not in bad}
        if saved:
            self._save()

    def _save(self) -> None:
        """Save a checkpoint, without failed samples."""
        if self.step <= self._saved_step:
            self.step += 1
        with self.io.new_checkpoint(self.step) as folder:
            for number in sorted(self.done):
                ours, path = (self._path(f, _DONE, number) for f in (self.folder, folder))
                if number in self._unsaved:
                    self.write(path, self._unsaved[number])
                    _link(path, ours)
                else:
                    _link(ours, path)
            for number, samples in self._waiting.items():
                good = [sample for sample in samples if not self.failed(sample)]
                self.write(self._path(folder, _WAITING, number), good)
            if (usage := self.usage()) is not None:
                text = json.dumps(usage_to_json(usage))
                (folder / _USAGE_FILE).write_text(text, encoding="utf-8")
        self._unsaved.clear()
        self._saved_step, self._saved_s = self.step, time.monotonic()

    def _restore(self) -> JudgeUsage | None:
        """Load the newest checkpoint; returns the judge's usage up to it."""
        if (checkpoint := self.io.latest_checkpoint()) is None:
            return None
        for number in range(1, len(self.batches) + 1):
            path = self._path(checkpoint.path, _DONE, number)
            if self._known(path) is not None:
                _link(path, self._path(self.folder, _DONE, number))
                self.done.add(number)
            elif waits := self._known(self._path(checkpoint.path, _WAITING, number)):
                self._waiting[number] = waits
        self.step = self._saved_step = checkpoint.step
        usage = checkpoint.path / _USAGE_FILE
        return usage_from_json(json.loads(usage.read_text())) if usage.exists() else None

    def _known(self, path: Path) -> list[S] | None:
        try:
            return self.read(path) if path.exists() else None
        except (DamagedCheckpoint, ValueError):
            return None

    def _path(self, folder: Path, what: str, number: int) -> Path:
        return folder / f"{what}-{number:06d}{self.suffix}"


_Work = TypeVar("_Work", bound=BatchWork[Any])


@contextmanager
def worked(
    kind: type[_Work],
    config: RecipeConfig,
    model_ref: str,
    batches: Sequence[Sequence[PlannedSample]],
    *,
    resources: Resources,
    batch_size: int,
    reporter: BatchReporter,
    output_dir: Path,
    window: int,
    generator: Generator | TurnGenerator | None,
    tokenizer: Any,
    open_servers: OpenServers | None,
    **own: Any,
) -> Iterator[_Work]:
    """Finished work on all batches; the end of the block deletes their files.

    It samples with the given generator and tokenizer; else with the model's, over servers if
    ``open_servers`` is given, or in this process on the device that ``resources`` request.
    ``window`` is the largest number of tokens of a prompt and its answer, or of an episode;
    ``own`` are further fields of ``kind``.
    """
    from refiner_core.generation.load import device_for, load_model, load_tokenizer, set_threads
    from refiner_core.generation.transformers_backend import TransformersGenerator

    if tokenizer is None:
        tokenizer = load_tokenizer(model_ref, config.model)
    on_step = reporter.turn if config.environment.name else reporter.step
    folder = output_dir / _FOLDER
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        with ExitStack() as opened:
            if generator is None and open_servers is not None:
                generator = opened.enter_context(open_servers(tokenizer, window, on_step))
            elif generator is None:
                set_threads(config.model)
                model = load_model(model_ref, config.model).to(device_for(resources))
                options: Any = {"batch_size": batch_size, "on_step": on_step}
                generator = TransformersGenerator(model, tokenizer, **options)
            work = kind(
                config=config,
                batches=batches,
                generator=generator,
                tokenizer=tokenizer,
                io=reporter.io,
                reporter=reporter,
                folder=folder,
                **own,
            )
            work.run()
        yield work


def _streams(rewards: RewardStream | None) -> bool:
    """True if a judge may work on a batch while the next one is sampled."""
    return rewards is not None and rewards.streams


def _link(source: Path, target: Path) -> None:
    """Hard-link a file; copy it if that is impossible."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
