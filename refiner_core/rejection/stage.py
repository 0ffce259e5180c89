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
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.files import replacing
from refiner_core.contract.types import DemonstrationRow, Generator, Judge, PromptRow, StageIO
from refiner_core.data.prepared import load_prompts, write_demonstrations
from refiner_core.environments.protocol import Environment
from refiner_core.environments.registry import open_environment
from refiner_core.generation.reporting import BatchReporter
from refiner_core.judges.surroundings import usage_to_json
from refiner_core.rejection.attempts import Report, require_kept, writing_attempts
from refiner_core.rejection.lanes import Lane, batches_of
from refiner_core.samples import check_room, load_generator

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
    reporter = BatchReporter(io, len(batches_of(config, prompts)), "attempts")
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
            lane = Lane(
                *(config, prompts, judge, sampler, tokenizer, environment),
                *(io, reporter, folder),
            )
            lane.run()
        reporter.batch(reporter.total, "write")
        report = _write(output_dir, lane)
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


def _write(output_dir: Path, lane: Lane) -> dict[str, Any]:
    """All files, one batch in memory at a time but for what is kept."""
    tally, kept = Report(lane.rule, lane.name), list[DemonstrationRow]()
    with writing_attempts(output_dir / "attempts.parquet") as write:
        for number in range(1, len(lane.batches) + 1):
            attempts = lane.rows(number)
            write(attempts)
            tally.add(attempts)
            kept += [lane.demonstration(a) for a in attempts if a.kept]
    report = tally.as_json()
    report["tokens"] |= {"loss": sum(sum(row.loss_mask) for row in kept)}
    report["longest"] = max((len(row.input_ids) for row in kept), default=0)
    if (usage := lane.usage()) is not None:
        report["judge"] = usage_to_json(usage)
    write_demonstrations(output_dir / "sft_train.parquet", kept)
    with replacing(output_dir / "report.json") as file:
        file.write(json.dumps(report, ensure_ascii=False, indent=1).encode())
    return report
