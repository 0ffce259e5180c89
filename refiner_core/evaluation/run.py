"""Evaluate one model: held-out prompts through it, its answers through rewards and ground truth.

In: the configuration, the data stage's folder, a model, a judge. Out: per-sample files and
``results.json`` with every number, its interval and its protocol.

Work is cut into units of whole prompts, one generation batch each. A judge that streams begins
with an answer when it is finished, and while it ends a unit the next one is sampled already. Seeds
derive from the protocol seed, the prompt and the sample index: every model meets the same random
numbers, and arms pair up.

What is done survives, whenever it is interrupted: the answers of a unit once all of it is sampled,
its rows once all of it is judged, and each judgement of a served judge as it comes (in the
workspace's store, so that no judged sample is asked about again). What is repeated at most is the
sampling of one unit, which is ``evaluate.batch_size`` answers. Half a unit could not be kept: the
rest would be decoded in other company, its sums taken in another order, and then the numbers would
depend on when somebody pulled a plug.

Beside the model stands the random copier (:mod:`refiner_core.data.copier`), scored by the same code
on the same prompts: an answer of perfect form that was written without reading. One answer a
prompt serves all decodings, since it does not depend on any. Its answers are the same in every
evaluation of a protocol, which makes them the control against a judge that drifts: with
``evaluate.fresh_reference`` a served judge is asked about them anew each time, whatever the store
knows, at the cost of one answer a prompt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError, Interrupted
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.types import (
    Completion,
    FreshJudge,
    Generator,
    Judge,
    JudgeUsage,
    PromptRow,
    StageIO,
    TurnGenerator,
)
from refiner_core.data.copier import random_copier
from refiner_core.data.prepared import load_prompts
from refiner_core.evaluation.metrics import sample_row
from refiner_core.evaluation.protocol import Decoding, make_protocol, sampling_params
from refiner_core.evaluation.results import Measured, write_results
from refiner_core.generation.completions import completion_text
from refiner_core.generation.reporting import BatchReporter
from refiner_core.judges.surroundings import usage_from_json, usage_to_json
from refiner_core.rewards import RewardInput, RewardStream, require_scored
from refiner_core.samples import (
    SampledBatch,
    Wanted,
    judge_meter,
    load_generator,
    sample_answers,
    sample_batches,
)

COPIER = "random_copier"
_ROWS_FILE = "rows.json"
_USAGE_FILE = "judge.json"
_SAMPLED_FILE = "sampled.json"


@dataclass(frozen=True)
class Circumstances:
    """Facts of an evaluation beside its configuration.

    Attributes
    ----------
    protocol_file
        Name of the protocol file that the configuration is under; empty for none.
    mark
        What tells this evaluation from all others, for what is asked afresh; the same in all of its
        attempts. Empty: nothing is.
    """

    protocol_file: str = ""
    mark: str = ""


class Unit(NamedTuple):
    """Samples of whole prompts that are made together; ``decoding`` None is the reference's.
    ``key`` names decoding or reference."""

    key: str
    decoding: Decoding | None
    wanted: tuple[Wanted, ...]


def asked(config: RecipeConfig, decoding: Decoding | None) -> int:
    """Number of samples of each prompt."""
    return config.evaluate.num_samples if decoding == "sampled" else 1


def units_of(
    config: RecipeConfig, prompts: Sequence[PromptRow], reference: str, *, whole: bool = True
) -> list[Unit]:
    """All work, in order: the reference first, which needs no model, then each decoding. A unit is
    a generation batch where units are kept ``whole``, and else all of a decoding."""
    units, evaluate = [], config.evaluate
    for decoding in (None, *evaluate.decoding):
        key, samples = decoding or reference, asked(config, decoding)
        size = max(1, evaluate.batch_size // samples) if whole else len(prompts)
        for first in range(0, len(prompts), size):
            wanted = tuple(
                Wanted(p, i, derive_seed(evaluate.seed, "evaluate", key, p.sample_id, i))
                for p in prompts[first : first + size]
                for i in range(samples)
            )
            units.append(Unit(key, decoding, wanted))
    return units


def open_generator(
    config: RecipeConfig,
    model_ref: str,
    reporter: BatchReporter,
    generator: Generator | TurnGenerator | None = None,
    tokenizer: Any = None,
) -> tuple[Any, Any]:
    """Generator and tokenizer: those given, else of the model, on the device that is configured."""
    from refiner_core.generation.load import load_tokenizer

    if tokenizer is None:
        tokenizer = load_tokenizer(model_ref, config.model)
    evaluate = config.evaluate
    made = generator or load_generator(
        *(config.model, model_ref, tokenizer, evaluate.resources),
        batch_size=evaluate.batch_size,
        on_step=reporter.turn if config.environment.name else reporter.step,
    )
    return made, tokenizer


class _Answer(NamedTuple):
    """One answer before it is scored."""

    prompt: PromptRow
    number: int
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
    circumstances: Circumstances | None = None,
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
    circumstances
        Of which protocol file it is, and by what a judge that is asked afresh tells it from others.

    Returns
    -------
    dict
        The content of ``results.json`` (:mod:`refiner_core.evaluation.results`).

    Raises
    ------
    DataError
        If there are no held-out prompts.
    Interrupted
        If asked to stop; finished units, and answers that are sampled, are kept.
    JudgeOutage
        If more of a unit's answers than ``judge.max_failed_share`` could not be judged, or nobody
        could be asked for too long; the same is kept.
    """
    prompts = load_prompts(data_dir / "rl_test.parquet")[: config.evaluate.max_prompts]
    if not prompts:
        raise DataError(
            f"{data_dir / 'rl_test.parquet'} holds no prompts to evaluate on",
            expected="at least one held-out prompt",
            fix="raise data.held_out_fraction, or give more rows",
        )
    units, around = units_of(config, prompts, COPIER), circumstances or Circumstances()
    reporter = BatchReporter(io, len(units), "samples")
    generator, tokenizer = open_generator(config, model_ref, reporter, generator, tokenizer)
    asked_afresh = _afresh(config, judge, around.mark)
    sampler = _Sampler(config, generator, tokenizer, judge, asked_afresh or judge)
    work = _Work(units, sampler, io, reporter)
    rows = work.run()
    measured = [
        Measured(
            make_protocol(config, prompts, decoding, data_digest, around.protocol_file),
            rows[decoding],
        )
        for decoding in config.evaluate.decoding
    ]
    told: dict[str, Any] = {}
    if isinstance(judge, FreshJudge):
        told = {"reference_fresh": asked_afresh is not None}
    usage, names = work.usage(), (model_name, model_ref)
    copied = (COPIER, rows[COPIER])
    return write_results(output_dir, config, names, measured, copied, judge_usage=usage, **told)


def _afresh(config: RecipeConfig, judge: Judge, mark: str) -> Judge | None:
    """The judge as it answers what it has been asked before; None where it shall not."""
    if not mark or not config.evaluate.fresh_reference or not isinstance(judge, FreshJudge):
        return None
    return judge.fresh(mark)


@dataclass(frozen=True)
class _Sampler:
    """Sampler of units; a judge that streams begins with each answer as it is finished."""

    config: RecipeConfig
    generator: Generator
    tokenizer: Any
    judge: Judge
    reference_judge: Judge

    def begin(self, unit: Unit, known: Sequence[_Answer] | None) -> SampledBatch[_Answer]:
        """A unit whose answers are ``known`` of an earlier attempt, or sampled now."""
        judge = self.reference_judge if unit.decoding is None else self.judge
        rewards = RewardStream(self.config.reward, judge)
        answers: dict[int, _Answer] = {}

        def add(place: int, answer: _Answer) -> None:
            answers[place] = answer
            rewards.add(place, RewardInput(answer.prompt, answer.text, answer.stopped))

        if known is not None:
            for place, answer in enumerate(known):
                add(place, answer)
        elif unit.decoding is None:
            for place, wanted in enumerate(unit.wanted):
                add(place, self._copied(wanted.prompt))
        else:
            self._sample(unit.wanted, unit.decoding, add)
        return SampledBatch(tuple(answers[i] for i in range(len(unit.wanted))), rewards)

    def _sample(
        self,
        wanted: Sequence[Wanted],
        decoding: Decoding,
        add: Callable[[int, _Answer], None],
    ) -> None:
        def finished(place: int, completion: Completion) -> None:
            text, length = completion_text(self.tokenizer, completion), len(completion.token_ids)
            one, stopped = wanted[place], completion.finish_reason == "stop"
            add(place, _Answer(one.prompt, one.number, text, length, stopped))

        params = sampling_params(self.config, decoding)
        sample_answers(self.generator, wanted, params, finished)

    def _copied(self, prompt: PromptRow) -> _Answer:
        seed = derive_seed(self.config.evaluate.seed, COPIER, prompt.sample_id)
        text = random_copier(prompt.prompt_text, random.Random(seed))
        length = len(self.tokenizer.encode(text, add_special_tokens=False))
        return _Answer(prompt, 0, text, length, stopped=True)


class _Work:
    """Units one after the other, from the newest checkpoint on."""

    def __init__(
        self, units: Sequence[Unit], sampler: _Sampler, io: StageIO, reporter: BatchReporter
    ) -> None:
        self.units, self.sampler, self.io, self.reporter = units, sampler, io, reporter
        self.rows: dict[str, list[dict[str, Any]]] = {unit.key: [] for unit in units}
        self.done = 0
        self.sampled: dict[int, tuple[_Answer, ...]] = {}
        self.usage = judge_meter(sampler.judge, self._restore())

    def run(self) -> dict[str, list[dict[str, Any]]]:
        """Rows by decoding (and the copier's)."""
        left = range(self.done + 1, len(self.units) + 1)
        if not sample_batches(left, self._begin, self._finish, self.io.should_stop):
            raise Interrupted(
                f"The evaluation stopped after {self.done} of {len(self.units)} batches",
                fix="run the same command again to go on",
            )
        self.reporter.batch(len(self.units), "numbers")
        return self.rows

    def _begin(self, number: int) -> SampledBatch[_Answer]:
        unit, known = self.units[number - 1], self.sampled.get(number)
        self.reporter.batch(self.done, unit.key)
        begun = self.sampler.begin(unit, known)
        if known is None:
            self.sampled[number] = begun.samples
            if begun.judging and unit.decoding is not None:
                self._save()  # else it is judged within the moment, and kept then
        return begun

    def _finish(self, number: int, begun: SampledBatch[_Answer]) -> None:
        """Wait for a unit's judgements, and keep it: a row per sample, in order."""
        assert begun.rewards is not None, "answers have rewards"
        results = begun.rewards.results(self.reporter.judged)
        require_scored(results, self.sampler.config.judge.max_failed_share, of="answers")
        rows = self.rows[self.units[number - 1].key]
        for (prompt, index, text, length, stopped), result in zip(
            begun.samples, results, strict=True
        ):
            rows.append(
                sample_row(
                    prompt, index, text, length_tokens=length, stopped=stopped, result=result
                )
            )
        self.done = number
        del self.sampled[self.done]
        if self.done < len(self.units):
            self._save()

    def _save(self) -> None:
        """A checkpoint. Its step counts units that are sampled and units that are judged."""
        with self.io.new_checkpoint(2 * self.done + len(self.sampled)) as folder:
            _write(folder / _ROWS_FILE, self.rows)
            sampled = [self.sampled[n] for n in sorted(self.sampled)]
            waiting = [[[a.prompt.sample_id, *a[1:]] for a in answers] for answers in sampled]
            _write(folder / _SAMPLED_FILE, {"judged": self.done, "waiting": waiting})
            if (usage := self.usage()) is not None:
                _write(folder / _USAGE_FILE, usage_to_json(usage))

    def _restore(self) -> JudgeUsage | None:
        """Take up the newest checkpoint; what the judge had done by then."""
        if (checkpoint := self.io.latest_checkpoint()) is None:
            return None
        self.rows = _read(checkpoint.path / _ROWS_FILE)
        self.done = checkpoint.step
        if (checkpoint.path / _SAMPLED_FILE).exists():  # not in checkpoints of older versions
            kept = _read(checkpoint.path / _SAMPLED_FILE)
            self.done = kept["judged"]
            prompts = {w.prompt.sample_id: w.prompt for unit in self.units for w in unit.wanted}
            for number, answers in enumerate(kept["waiting"], start=self.done + 1):
                made = tuple(_Answer(prompts[sample_id], *rest) for sample_id, *rest in answers)
                self.sampled[number] = made
        usage = checkpoint.path / _USAGE_FILE
        return usage_from_json(_read(usage)) if usage.exists() else None


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
