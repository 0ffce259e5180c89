"""Evaluate one model: held-out prompts through it, its answers through rewards and ground truth.

In: the configuration, the data stage's folder, a model, a judge. Out: per-sample files and
``results.json`` with every number, its interval and its protocol.

Work is cut into units of whole prompts, one generation batch each. After a unit, what is done is a
checkpoint, so an interrupted evaluation goes on with the next unit. Seeds derive from the protocol
seed, the prompt and the sample index: every model meets the same random numbers, and arms pair up.

Beside the model stands the random copier (:mod:`refiner_core.data.copier`), scored by the same code
on the same prompts: an answer of perfect form that was written without reading. One answer a
prompt serves all decodings, since it does not depend on any.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError, Interrupted, JudgeOutage
from refiner_core.contract.seeds import derive_seed
from refiner_core.contract.types import (
    GenerationRequest,
    Generator,
    Judge,
    Progress,
    PromptRow,
    StageIO,
)
from refiner_core.data.copier import random_copier
from refiner_core.data.prepared import load_prompts
from refiner_core.evaluation.protocol import Decoding, make_protocol, sampling_params
from refiner_core.evaluation.results import Measured, write_results
from refiner_core.evaluation.samples import sample_row
from refiner_core.generation.text import completion_text
from refiner_core.rewards import RewardInput, compute_rewards

COPIER = "random_copier"
_ROWS_FILE = "rows.json"


@dataclass(frozen=True)
class _Unit:
    """Whole prompts that are sampled and scored together. ``decoding`` None is the copier."""

    decoding: Decoding | None
    prompts: tuple[PromptRow, ...]

    @property
    def key(self) -> str:
        return self.decoding or COPIER


@dataclass(frozen=True)
class _Answer:
    """One answer before it is scored."""

    prompt: PromptRow
    index: int
    text: str
    length_tokens: int
    stopped: bool


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
) -> dict[str, Any]:
    """Measure a model under every configured decoding.

    Parameters
    ----------
    data_dir, data_digest
        The data stage's output folder (``rl_test.parquet`` is read) and its digest.
    model_ref
        What :func:`refiner_core.generation.load.load_model` takes.
    model_name
        ``base``, ``sft``, ``grpo`` …: the ``stage`` of every row.
    generator, tokenizer
        Made from ``model_ref`` where not given.

    Returns
    -------
    dict
        The content of ``results.json`` (:mod:`refiner_core.evaluation.results`).

    Raises
    ------
    DataError
        If there are no held-out prompts.
    Interrupted
        If asked to stop; finished units are kept.
    JudgeOutage
        If more of a unit's answers than ``judge.max_failed_share`` could not be judged.
    """
    prompts = load_prompts(data_dir / "rl_test.parquet")[: config.evaluate.max_prompts]
    if not prompts:
        raise DataError(
            f"{data_dir / 'rl_test.parquet'} holds no prompts to evaluate on",
            expected="at least one held-out prompt",
            fix="raise data.held_out_fraction, or give more rows",
        )
    units = _units(config, prompts)
    reporter = _Reporter(io, len(units))
    if generator is None:
        generator, tokenizer = _load(config, model_ref, reporter)
    elif tokenizer is None:
        from refiner_core.generation.load import load_tokenizer

        tokenizer = load_tokenizer(model_ref, config.model)
    scorer = _Scorer(config, judge, generator, tokenizer)
    rows = _run_units(units, scorer, io, reporter)
    measured = [
        Measured(make_protocol(config, prompts, decoding, data_digest), rows[decoding])
        for decoding in config.evaluate.decoding
    ]
    return write_results(
        output_dir, config, model_name, model_ref, measured, reference=(COPIER, rows[COPIER])
    )


class _Reporter:
    """Tells how far the work is; within a batch at most once a second."""

    def __init__(self, io: StageIO, total: int) -> None:
        self.io, self.total, self.done, self.phase = io, total, 0, ""
        self.last_s = time.monotonic()

    def batch(self, done: int, phase: str) -> None:
        """``done`` batches are finished and the next one is of this phase."""
        self.done, self.phase = done, phase
        self.io.progress(Progress(done=done, total=self.total, phase=phase))

    def step(self, finished: int, samples: int) -> None:
        """A token was decoded; so many samples of the batch are finished."""
        now_s = time.monotonic()
        if now_s - self.last_s < 1.0:
            return
        self.last_s = now_s
        values = {"samples_finished": float(finished), "samples": float(samples)}
        self.io.progress(
            Progress(done=self.done, total=self.total, phase=self.phase, values=values)
        )


def _load(config: RecipeConfig, model_ref: str, reporter: _Reporter) -> tuple[Generator, Any]:
    """A generator over the model, on the device that the configuration asks for."""
    from refiner_core.generation.load import device_for, load_model, load_tokenizer, set_threads
    from refiner_core.generation.transformers_backend import TransformersGenerator

    set_threads(config.model)
    tokenizer = load_tokenizer(model_ref, config.model)
    model = load_model(model_ref, config.model).to(device_for(config.evaluate.resources))
    generator = TransformersGenerator(
        model, tokenizer, batch_size=config.evaluate.batch_size, on_step=reporter.step
    )
    return generator, tokenizer


def _units(config: RecipeConfig, prompts: Sequence[PromptRow]) -> list[_Unit]:
    """All work, in order: the copier first, which needs no model, then each decoding."""

    def cut(decoding: Decoding | None, samples: int) -> Iterator[_Unit]:
        size = max(1, config.evaluate.batch_size // samples)
        for first in range(0, len(prompts), size):
            yield _Unit(decoding, tuple(prompts[first : first + size]))

    units = list(cut(None, 1))
    for decoding in config.evaluate.decoding:
        units += cut(decoding, config.evaluate.num_samples if decoding == "sampled" else 1)
    return units


def _run_units(
    units: Sequence[_Unit], scorer: _Scorer, io: StageIO, reporter: _Reporter
) -> dict[str, list[dict[str, Any]]]:
    """Rows by decoding (and the copier's). Goes on from the newest checkpoint."""
    done = 0
    rows: dict[str, list[dict[str, Any]]] = {unit.key: [] for unit in units}
    if (checkpoint := io.latest_checkpoint()) is not None:
        done = checkpoint.step
        rows = json.loads((checkpoint.path / _ROWS_FILE).read_text(encoding="utf-8"))
    for number, unit in enumerate(units[done:], start=done + 1):
        if io.should_stop():
            raise Interrupted(
                f"The evaluation stopped after {number - 1} of {len(units)} batches",
                fix="run the same command again to go on",
            )
        reporter.batch(number - 1, unit.key)
        rows[unit.key] += scorer.score(unit)
        if number < len(units):
            with io.new_checkpoint(number) as folder:
                text = json.dumps(rows, ensure_ascii=False)
                (folder / _ROWS_FILE).write_text(text, encoding="utf-8")
    reporter.batch(len(units), "numbers")
    return rows


class _Scorer:
    """Samples and scores a unit."""

    def __init__(
        self, config: RecipeConfig, judge: Judge, generator: Generator, tokenizer: Any
    ) -> None:
        self.config, self.judge = config, judge
        self.generator, self.tokenizer = generator, tokenizer

    def score(self, unit: _Unit) -> list[dict[str, Any]]:
        """One row per sample, in order of (prompt, sample)."""
        answers = self._copied(unit) if unit.decoding is None else self._sampled(unit)
        items = [RewardInput(prompt=a.prompt, text=a.text, stopped=a.stopped) for a in answers]
        results = compute_rewards(items, self.config.reward, self.judge)
        failed = sum(result.status == "unscored" for result in results)
        if failed > self.config.judge.max_failed_share * len(results):
            raise JudgeOutage(
                f"The judge failed on {failed} of {len(results)} answers",
                expected=f"at most a share of {self.config.judge.max_failed_share}",
                fix="bring the judge back and run the same command again; or raise "
                "judge.max_failed_share",
            )
        return [
            sample_row(
                a.prompt,
                a.index,
                a.text,
                length_tokens=a.length_tokens,
                stopped=a.stopped,
                result=result,
            )
            for a, result in zip(answers, results, strict=True)
        ]

    def _sampled(self, unit: _Unit) -> list[_Answer]:
        evaluate, decoding = self.config.evaluate, unit.decoding
        assert decoding is not None
        samples = evaluate.num_samples if decoding == "sampled" else 1
        places = [(prompt, index) for prompt in unit.prompts for index in range(samples)]
        requests = [
            GenerationRequest(
                prompt.prompt_ids,
                derive_seed(evaluate.seed, "evaluate", decoding, prompt.sample_id, index),
            )
            for prompt, index in places
        ]
        completions = self.generator.generate(requests, sampling_params(self.config, decoding))
        return [
            _Answer(
                prompt,
                index,
                completion_text(self.tokenizer, completion),
                len(completion.token_ids),
                completion.finish_reason == "stop",
            )
            for (prompt, index), completion in zip(places, completions, strict=True)
        ]

    def _copied(self, unit: _Unit) -> list[_Answer]:
        answers = []
        for prompt in unit.prompts:
            seed = derive_seed(self.config.evaluate.seed, COPIER, prompt.sample_id)
            text = random_copier(prompt.prompt_text, random.Random(seed))
            length = len(self.tokenizer.encode(text, add_special_tokens=False))
            answers.append(_Answer(prompt, 0, text, length, stopped=True))
        return answers
