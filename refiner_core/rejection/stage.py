"""The stage ``sample``: a model's own attempts at the training prompts, the good ones kept.

In: ``data_dir/rl_train.parquet`` (prompts, or tasks where the recipe has an environment), a model.
Out, in ``output_dir``:

=========================== =======================================================================
``sft_train.parquet``       the attempts that are kept, as demonstrations: the very tokens that were
                            sampled, loss on the model's own and on what ends its turns
``attempts.parquet``        every attempt, what it was worth, and why it is kept or not
``report.json``             counts, :class:`~refiner_core.rejection.attempts.Report`
=========================== =======================================================================

There is no validation set: attempts at the same prompts on both sides would measure memory.

Seeds derive from the run's, the prompt and the number of the attempt, so that a further attempt or
another prompt changes no other's.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from refiner_core.contract.config import RecipeConfig, SampleConfig
from refiner_core.contract.errors import (
    DamagedCheckpoint,
    DataError,
    EnvironmentOutage,
    Interrupted,
    RefinerError,
)
from refiner_core.contract.files import replacing
from refiner_core.contract.types import (
    DemonstrationRow,
    Generator,
    Judge,
    JudgeUsage,
    PromptRow,
    SavedCheckpoint,
    StageIO,
)
from refiner_core.data.prepared import load_prompts, write_demonstrations
from refiner_core.environments.protocol import Environment
from refiner_core.environments.registry import open_environment
from refiner_core.generation.reporting import BatchReporter
from refiner_core.judges.surroundings import usage_from_json, usage_to_json
from refiner_core.rejection.attempts import (
    Attempt,
    Report,
    batch_metrics,
    choose,
    join_files,
    load_attempts,
    require_kept,
    write_attempts,
)
from refiner_core.rejection.lanes import Lane
from refiner_core.rewards import RewardInput
from refiner_core.samples import (
    SampledBatch,
    check_room,
    judge_meter,
    load_generator,
    sample_batches,
)

#: Where a batch may be kept in parts, that is done about so often, seconds.
KEEP_EVERY_S = 60.0
_USAGE_FILE = "judge.json"
_DONE, _WAITING = "batch", "waiting"


def batches_of(prompts: Sequence[PromptRow], rule: SampleConfig) -> list[tuple[PromptRow, ...]]:
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
        batches: Sequence[tuple[PromptRow, ...]],
        lane: Lane,
        judge: Judge | None,
        io: StageIO,
        reporter: BatchReporter,
        folder: Path,
    ) -> None:
        self.rule, self.batches, self.lane = rule, batches, lane
        self.io, self.reporter, self.folder = io, reporter, folder
        self.step = self.done = 0
        self._saved_step, self._saved_at_done, self._saved_s = 0, 0, time.monotonic()
        self._waiting: dict[int, tuple[Attempt, ...]] = {}
        self._spent: dict[int, tuple[int, float]] = {}  # batch: tokens sampled now, seconds
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.usage = judge_meter(judge, self._restore())

    @property
    def files(self) -> list[Path]:
        """The files of finished batches, in order."""
        return [self.folder / _name(_DONE, number) for number in range(1, self.done + 1)]

    def run(self) -> None:
        """Every batch that is left.

        Raises
        ------
        Interrupted
            A stop was asked for; what is finished is kept.
        """
        left = range(self.done + 1, len(self.batches) + 1)
        if not sample_batches(left, self._begin, self._finish, self.io.should_stop):
            self._stop()

    def _begin(self, number: int) -> SampledBatch[Attempt]:
        """A batch that is sampled: by an earlier attempt of the stage, or now. A judge that streams
        begins with each attempt as it is finished."""
        self.reporter.batch(self.done, "sample")
        known, started = self._waiting.get(number, ()), time.perf_counter()
        wanted, rewards = self.lane.wanted(self.batches[number - 1]), self.lane.rewards()
        places = {one.key: place for place, one in enumerate(wanted)}
        attempts: dict[tuple[str, int], Attempt] = {}

        def there() -> tuple[Attempt, ...]:
            return tuple(attempts[key] for key in places if key in attempts)

        def take(attempt: Attempt) -> None:
            place = places[attempt.key]
            attempts[attempt.key] = attempt
            if rewards is not None:
                prompt, stopped = wanted[place].prompt, attempt.ended == "stop"
                rewards.add(place, RewardInput(prompt, attempt.text, stopped))

        def finished(attempt: Attempt) -> None:
            take(attempt)
            self.reporter.step(len(attempts), len(wanted))
            if self.lane.keeps_parts and time.monotonic() - self._saved_s >= KEEP_EVERY_S:
                self._wait_with(number, there())
                self._save()

        for attempt in known:
            take(attempt)
        try:
            left = [one for one in wanted if one.key not in attempts]
            self.lane.sample(left, finished, self.io.should_stop)
        except RefinerError as error:
            if self.lane.keeps_parts:
                self._wait_with(number, there())
                if isinstance(error, Interrupted):
                    self._stop(len(attempts))
                self._save()
            raise
        begun = SampledBatch(there(), rewards)
        tokens = sum(a.sampled_tokens for a in begun.samples)
        tokens -= sum(a.sampled_tokens for a in known)
        self._spent[number] = (tokens, time.perf_counter() - started)
        if len(known) < len(begun.samples) and begun.judging:
            self._wait_with(number, begun.samples)  # else it is scored within the moment
            self._save()
        return begun

    def _finish(self, number: int, begun: SampledBatch[Attempt]) -> None:
        """Wait for a batch's scores, choose, and keep it."""
        try:
            scored = self.lane.scored(self.batches[number - 1], begun, self.reporter.judged)
        except EnvironmentOutage:
            if self.lane.keeps_parts:
                self._wait_with(number, begun.samples)
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
        return [attempt for group in groups for attempt in choose(group, self.rule)]

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
            if (usage := self.usage()) is not None:
                text = json.dumps(usage_to_json(usage))
                (folder / _USAGE_FILE).write_text(text, encoding="utf-8")
        self._saved_step, self._saved_at_done = self.step, self.done
        self._saved_s = time.monotonic()

    def _restore(self) -> JudgeUsage | None:
        """Take up the newest checkpoint that can be read; what the judge had done by then."""
        while (checkpoint := self.io.latest_checkpoint()) is not None:
            try:
                return self._restore_from(checkpoint)
            except DamagedCheckpoint as error:
                self.io.pass_over(checkpoint, error.what)
                self._waiting.clear()
                for path in self.folder.iterdir():
                    path.unlink()
        return None

    def _restore_from(self, checkpoint: SavedCheckpoint) -> JudgeUsage | None:
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
        if not usage.exists():
            return None
        return usage_from_json(json.loads(usage.read_text(encoding="utf-8")))


def _name(what: str, number: int) -> str:
    return f"{what}-{number:06d}.parquet"


def _link(source: Path, target: Path) -> None:
    """One file under two names; a copy where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


#: Told after every decoded token, or so, of (attempts finished, attempts of the batch).
OnStep = Callable[[int, int], None]
#: Makes a generator that calls ``on_step``, and gives it back with its block.
OpenGenerator = Callable[[Any, OnStep], AbstractContextManager[Generator]]

_BATCHES = ".batches"


def sample_attempts(
    config: RecipeConfig,
    *,
    data_dir: Path,
    model_ref: str,
    output_dir: Path,
    io: StageIO,
    judge: Judge | None,
    generator: Generator | None = None,
    tokenizer: Any = None,
    environment: Environment | None = None,
    open_generator: OpenGenerator | None = None,
) -> dict[str, Any]:
    """Sample ``sample.attempts`` attempts at every training prompt, and keep the good ones.

    Parameters
    ----------
    data_dir
        The data stage's folder; ``rl_train.parquet`` is read.
    model_ref
        What :func:`refiner_core.generation.load.load_model` takes.
    judge
        Scores answers; of an agent's recipe only assertions in plain language ask it.
    generator, tokenizer, environment
        Made from ``model_ref`` and the recipe where not given.
    open_generator
        Starts servers in the place of a model in this process; it is given the tokenizer and whom
        to tell of progress.

    Returns
    -------
    dict
        The content of ``report.json``.

    Raises
    ------
    DataError
        There are no prompts, or no attempt is kept.
    Interrupted
        A stop was asked for; finished batches are kept.
    JudgeOutage, EnvironmentOutage
        Too many attempts of a batch have no score; the same is kept.
    """
    prompts = _prompts(config, data_dir / "rl_train.parquet")
    batches = batches_of(prompts, config.sample)
    reporter = BatchReporter(io, len(batches), "attempts")
    on_step = reporter.turn if config.environment.name else reporter.step
    if tokenizer is None:
        from refiner_core.generation.load import load_tokenizer

        tokenizer = load_tokenizer(model_ref, config.model)
    opened: AbstractContextManager[Generator]
    if generator is None and open_generator is not None:
        opened = open_generator(tokenizer, on_step)
    else:
        rule = config.sample
        opened = nullcontext(
            generator
            or load_generator(
                *(config.model, model_ref, tokenizer, rule.resources),
                batch_size=rule.generation_batch_size,
                on_step=on_step,
            )
        )
    folder = output_dir / _BATCHES
    try:
        with opened as sampler:
            if config.environment.name and environment is None:
                environment = open_environment(config, evaluation=False, judge=judge)
            lane = Lane(config, judge, sampler, tokenizer, environment)
            work = Work(config.sample, batches, lane, judge, io, reporter, folder)
            work.run()
        reporter.batch(len(batches), "write")
        report = _write(config, output_dir, work, lane, prompts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    require_kept(report)
    return report


def _prompts(config: RecipeConfig, path: Path) -> list[PromptRow]:
    prompts = load_prompts(path)
    if not prompts:
        raise DataError(
            f"{path} holds no prompts to sample attempts at",
            expected="at least one training prompt",
            fix="lower data.held_out_fraction, or give more rows",
        )
    check_room(prompts, config.grpo)
    return prompts


def _write(
    config: RecipeConfig,
    output_dir: Path,
    work: Work,
    lane: Lane,
    prompts: Sequence[PromptRow],
) -> dict[str, Any]:
    """All files, one batch in memory at a time but for what is kept."""
    by_id = {prompt.sample_id: prompt for prompt in prompts}
    tally, kept = Report(config.sample, lane.name), list[DemonstrationRow]()
    for path in work.files:
        attempts = load_attempts(path)
        tally.add(attempts)
        kept += [lane.demonstration(by_id[a.sample_id], a) for a in attempts if a.kept]
    report = tally.as_json()
    report["tokens"] |= {"loss": sum(sum(row.loss_mask) for row in kept)}
    report["longest"] = max((len(row.input_ids) for row in kept), default=0)
    if (usage := work.usage()) is not None:
        report["judge"] = usage_to_json(usage)
    join_files(work.files, output_dir / "attempts.parquet")
    write_demonstrations(output_dir / "sft_train.parquet", kept)
    with replacing(output_dir / "report.json") as file:
        file.write(json.dumps(report, ensure_ascii=False, indent=1).encode())
    return report
