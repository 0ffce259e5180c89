"""The stage ``sample``: a model's own attempts at the training prompts, the good ones kept.

In: ``data_dir/rl_train.parquet`` (prompts, or tasks where the recipe has an environment), a model.
Out, in ``output_dir``:

=========================== =======================================================================
``sft_train.parquet``       the attempts that are kept, as demonstrations: the very tokens that were
                            sampled, loss on the model's own and on what ends its turns
``attempts.parquet``        every attempt, what it was worth, and why it is kept or not
``report.json``             :mod:`.report`
=========================== =======================================================================

There is no validation set: attempts at the same prompts on both sides would measure memory.

Seeds derive from the run's, the prompt and the number of the attempt, so that a further attempt or
another prompt changes no other's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.files import replacing
from refiner_core.contract.types import DemonstrationRow, Generator, Judge, PromptRow, StageIO
from refiner_core.data.prepared import load_prompts, write_demonstrations
from refiner_core.environments.protocol import Environment
from refiner_core.generation.reporting import BatchReporter
from refiner_core.judges.usage import usage_to_json
from refiner_core.rejection.answers import AnswerLane, check_room
from refiner_core.rejection.attempts import join_files, load_attempts
from refiner_core.rejection.lane import Lane
from refiner_core.rejection.report import Report, require_kept
from refiner_core.rejection.work import Work, batches_of

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
    if generator is not None:
        opened: AbstractContextManager[Generator] = _given(generator)
    elif open_generator is not None:
        opened = open_generator(tokenizer, on_step)
    else:
        opened = _loaded(config, model_ref, tokenizer, on_step)
    folder = output_dir / _BATCHES
    try:
        with opened as sampler:
            lane = _lane(config, judge, sampler, tokenizer, environment)
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


def _lane(
    config: RecipeConfig,
    judge: Judge | None,
    generator: Generator,
    tokenizer: Any,
    environment: Environment | None,
) -> Lane:
    if config.environment.name:
        if environment is None:
            from refiner_core.environments.registry import open_environment

            environment = open_environment(config, evaluation=False, judge=judge)
        from refiner_core.rejection.episodes import EpisodeLane

        return EpisodeLane(config, environment, generator, tokenizer)
    if judge is None:
        raise ValueError("answers are scored by a judge, and none is given")
    return AnswerLane(config, judge, generator, tokenizer)


@contextmanager
def _given(generator: Generator) -> Iterator[Generator]:
    yield generator


@contextmanager
def _loaded(
    config: RecipeConfig, model_ref: str, tokenizer: Any, on_step: OnStep
) -> Iterator[Generator]:
    """A generator over the model, on the device that the configuration asks for."""
    from refiner_core.generation.load import device_for, load_model, set_threads
    from refiner_core.generation.transformers_backend import TransformersGenerator

    set_threads(config.model)
    rule = config.sample
    model = load_model(model_ref, config.model).to(device_for(rule.resources))
    yield TransformersGenerator(
        model, tokenizer, batch_size=rule.generation_batch_size, on_step=on_step
    )


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
    if work.usage is not None:
        report["judge"] = usage_to_json(work.usage)
    join_files(work.files, output_dir / "attempts.parquet")
    write_demonstrations(output_dir / "sft_train.parquet", kept)
    with replacing(output_dir / "report.json") as file:
        file.write(json.dumps(report, ensure_ascii=False, indent=1).encode())
    return report
