"""Evaluation of one model: held-out prompts to answers, rewards and ground-truth scores.

In: the configuration, the data stage's folder, a model, a judge. Out: per-sample files and
``results.json`` with every number, its interval and its protocol.

Work is cut into units of whole prompts, one generation batch each. A streaming judge starts with an
answer when it is finished, and while it finishes a unit the next one is already sampled. Seeds
derive from the protocol seed, the prompt and the sample index: every model meets the same random
numbers, so that arms are paired.

Finished work survives interruptions: the answers of a unit once all of it is sampled, its rows once
all of it is judged, and each judgement of a served judge immediately (in the workspace's store, so
that no judged sample is asked about again). At most the sampling of one unit,
``evaluate.batch_size`` answers, is repeated. Half a unit cannot be kept: the rest would be decoded
in another batch, with sums in another order, and numbers would depend on the time of the
interruption.

The reference is the random copier (:mod:`refiner_core.data.random_baseline`), scored by the same
code on the same prompts: an answer of perfect form, written without reading. One answer per
prompt serves all decodings, since it depends on none. Its answers are the same in every
evaluation of a protocol, which makes them the control against a judge that drifts: with
``evaluate.fresh_reference`` a served judge judges them anew each time, bypassing the store, at the
cost of one answer per prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from refiner_core.batches import BatchWork, worked
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.types import (
    Completion,
    Generator,
    Judge,
    PromptRow,
    RewardResult,
    StageIO,
    StreamingJudge,
)
from refiner_core.data.prepared import load_prompts
from refiner_core.data.random_baseline import random_baseline_answers
from refiner_core.evaluation.metrics import sample_row
from refiner_core.evaluation.protocol import Decoding, make_protocol, sampling_params
from refiner_core.evaluation.results import MeasuredRows, write_results
from refiner_core.generation.completions import completion_text
from refiner_core.rewards import RewardInput, RewardStream, require_scored
from refiner_core.samples import BatchReporter, OpenServers, PlannedSample, sample_answers

COPIER = "random_copier"
_Row = dict[str, Any]


class _SampleUnit(NamedTuple):
    """Samples of whole prompts that are made together; ``decoding`` is None for the reference.
    ``key`` names the decoding or reference."""

    key: str
    decoding: Decoding | None
    wanted: tuple[PlannedSample, ...]


def asked(config: RecipeConfig, decoding: Decoding | None) -> int:
    """Number of samples per prompt."""
    return config.evaluate.num_samples if decoding == "sampled" else 1


def units_of(
    config: RecipeConfig, prompts: Sequence[PromptRow], reference: str, *, whole: bool = True
) -> list[_SampleUnit]:
    """All work, in order: the reference first, which needs no model, then each decoding. A unit is
    a generation batch if units are kept ``whole``, and else all of a decoding."""
    units, evaluate = [], config.evaluate
    for decoding in (None, *evaluate.decoding):
        key, samples = decoding or reference, asked(config, decoding)
        size = max(1, evaluate.batch_size // samples) if whole else len(prompts)
        for first in range(0, len(prompts), size):
            wanted = tuple(
                PlannedSample(p, i, derive_seed(evaluate.seed, "evaluate", key, p.sample_id, i))
                for p in prompts[first : first + size]
                for i in range(samples)
            )
            units.append(_SampleUnit(key, decoding, wanted))
    return units


@dataclass(eq=False, kw_only=True)
class UnitWork(BatchWork[_Row]):
    """Samples of an evaluation, by units; each is a row without its metrics."""

    what = "The evaluation"
    units: Sequence[_SampleUnit]

    def key(self, sample: _Row) -> tuple[str, int]:
        """See :class:`~refiner_core.batches.BatchWork`."""
        return str(sample["sample_id"]), int(sample["sample_index"])


_Work = TypeVar("_Work", bound=UnitWork)


def work_units(
    kind: type[_Work],
    config: RecipeConfig,
    model_ref: str,
    units: Sequence[_SampleUnit],
    *,
    io: StageIO,
    total: int,
    **more: Any,
) -> tuple[_Work, dict[str, list[_Row]]]:
    """Do the work; returns it, and the rows of each key, in order.

    ``total`` is that of the progress, ``more`` is of :func:`~refiner_core.batches.worked`.
    """
    reporter, rows = BatchReporter(io, total, "samples"), dict[str, list[_Row]]()
    with worked(
        *(kind, config, model_ref, [unit.wanted for unit in units]),
        resources=config.evaluate.resources,
        batch_size=config.evaluate.batch_size,
        reporter=reporter,
        units=units,
        **more,
    ) as work:
        reporter.batch(total, "numbers")
        for number, unit in enumerate(units, start=1):
            rows.setdefault(unit.key, []).extend(work.rows(number))
    return work, rows


def evaluate_model(
    config: RecipeConfig,
    *,
    data_dir: Path,
    data_digest: str,
    model_ref: str,
    model_name: str,
    output_dir: Path,
    io: StageIO,
    judge: Judge,
    generator: Generator | None = None,
    tokenizer: Any = None,
    open_servers: OpenServers | None = None,
    protocol_file: str = "",
    mark: str = "",
) -> dict[str, Any]:
    """Evaluate a model under every configured decoding.

    Parameters
    ----------
    data_dir, data_digest
        The data stage's output folder (``rl_test.parquet`` is read) and its digest.
    model_ref
        Reference for :func:`refiner_core.generation.load.load_model`.
    model_name
        ``base``, ``sft``, ``grpo`` …: the ``stage`` of every row.
    generator, tokenizer
        Made from ``model_ref`` if not given.
    open_servers
        Starts servers instead of loading a model in this process.
    protocol_file
        Name of the protocol file of the configuration; empty for none.
    mark
        Unique mark of this evaluation for judging the reference anew; the same in all of its
        attempts. Empty: the store is used.

    Returns
    -------
    dict
        The content of ``results.json`` (:mod:`refiner_core.evaluation.results`).

    Raises
    ------
    DataError
        There are no held-out prompts.
    Interrupted
        A stop was requested; finished units, and sampled answers, are kept.
    JudgeOutage
        More of a unit's answers than ``judge.max_failed_share`` could not be judged, or no judge
        was available for too long; the same is kept.
    """
    prompts = load_prompts(data_dir / "rl_test.parquet")[: config.evaluate.max_prompts]
    if not prompts:
        raise DataError(
            f"{data_dir / 'rl_test.parquet'} holds no prompts to evaluate on",
            expected="at least one held-out prompt",
            fix="raise data.held_out_fraction, or give more rows",
        )
    units = units_of(config, prompts, COPIER)
    fresh = None
    if mark and config.evaluate.fresh_reference and isinstance(judge, StreamingJudge):
        fresh = judge.fresh(mark)
    window = max(len(row.prompt_ids) for row in prompts) + config.grpo.response_length
    work, rows = work_units(
        *(_Answers, config, model_ref, units),
        io=io,
        output_dir=output_dir,
        total=len(units),
        window=window,
        generator=generator,
        tokenizer=tokenizer,
        open_servers=open_servers,
        judge=judge,
        reference_judge=fresh or judge,
    )
    measured = [
        MeasuredRows(
            make_protocol(config, prompts, decoding, data_digest, protocol_file), rows[decoding]
        )
        for decoding in config.evaluate.decoding
    ]
    told: dict[str, Any] = {}
    if isinstance(judge, StreamingJudge):
        told = {"reference_fresh": fresh is not None}
    usage, names = work.usage(), (model_name, model_ref)
    copied = (COPIER, rows[COPIER])
    return write_results(output_dir, config, names, measured, copied, judge_usage=usage, **told)


@dataclass(eq=False, kw_only=True)
class _Answers(UnitWork):
    """Answers by units, including the copier's."""

    reference_judge: Judge

    def tell(self, number: int, finished: int) -> None:
        if not finished:
            self.reporter.batch(len(self.done), self.units[number - 1].key)

    def rewards(self, number: int) -> RewardStream:
        reference = self.units[number - 1].decoding is None
        judge = self.reference_judge if reference else self.judge
        assert judge is not None, "answers are judged"
        return RewardStream(self.config.reward, judge)

    def answer(self, wanted: PlannedSample, sample: _Row) -> RewardInput:
        return RewardInput(wanted.prompt, sample["response_text"], sample["stopped"])

    def sample(
        self, number: int, wanted: Sequence[PlannedSample], finished: Callable[[_Row], None]
    ) -> None:
        decoding = self.units[number - 1].decoding

        def ended(place: int, text: str, length: int, stopped: bool) -> None:
            one = wanted[place]
            row = {"sample_id": one.prompt.sample_id, "sample_index": one.number}
            finished({**row, "response_text": text, "length_tokens": length, "stopped": stopped})

        def completed(place: int, completion: Completion) -> None:
            text, stopped = completion_text(self.tokenizer, completion), completion.finish_reason
            ended(place, text, len(completion.token_ids), stopped == "stop")

        if decoding is not None:
            params = sampling_params(self.config, decoding)
            sample_answers(self.generator, wanted, params, completed)
            return
        for place, one in enumerate(wanted):
            seed = derive_seed(self.config.evaluate.seed, COPIER, one.prompt.sample_id)
            text = random_baseline_answers(one.prompt.prompt_text, random.Random(seed))
            ended(place, text, len(self.tokenizer.encode(text, add_special_tokens=False)), True)

    def scored(
        self, number: int, samples: list[_Row], results: Sequence[RewardResult] | None
    ) -> list[_Row]:
        assert results is not None, "answers have rewards"
        require_scored(results, self.config.judge.max_failed_share, of="answers")
        return [
            sample_row(
                one.prompt,
                one.number,
                sample["response_text"],
                length_tokens=sample["length_tokens"],
                stopped=sample["stopped"],
                result=result,
            )
            for one, sample, result in zip(self.batches[number - 1], samples, results, strict=True)
        ]
