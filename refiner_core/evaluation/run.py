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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError, Interrupted
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.types import (
    Completion,
    FreshJudge,
    GenerationRequest,
    Generator,
    Judge,
    JudgeUsage,
    PromptRow,
    SavedCheckpoint,
    StageIO,
)
from refiner_core.data.copier import random_copier
from refiner_core.data.prepared import load_prompts
from refiner_core.evaluation.metrics import sample_row
from refiner_core.evaluation.protocol import Decoding, make_protocol, sampling_params
from refiner_core.evaluation.results import Measured, Measurement, write_results
from refiner_core.generation.completions import completion_text
from refiner_core.generation.reporting import BatchReporter
from refiner_core.judges.surroundings import (
    usage_between,
    usage_from_json,
    usage_of,
    usage_sum,
    usage_to_json,
)
from refiner_core.rewards import RewardInput, RewardStream, require_scored

COPIER = "random_copier"
_ROWS_FILE = "rows.json"
_USAGE_FILE = "judge.json"
_SAMPLED_FILE = "sampled.json"


@dataclass(frozen=True)
class Circumstances:
    """What there is to know of an evaluation beside its configuration.

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

    def kept(self) -> list[Any]:
        """For a checkpoint."""
        return [self.prompt.sample_id, self.index, self.text, self.length_tokens, self.stopped]


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
    units, around = _units(config, prompts), circumstances or Circumstances()
    reporter = BatchReporter(io, len(units), "samples")
    if generator is None:
        generator, tokenizer = load_generator(config, model_ref, reporter)
    elif tokenizer is None:
        from refiner_core.generation.load import load_tokenizer

        tokenizer = load_tokenizer(model_ref, config.model)
    asked_afresh = _afresh(config, judge, around.mark)
    scorer = _Scorer(config, judge, asked_afresh or judge, generator, tokenizer)
    work = _Work(units, scorer, io, reporter)
    rows = work.run()
    measured = [
        Measured(
            make_protocol(config, prompts, decoding, data_digest, around.protocol_file),
            rows[decoding],
        )
        for decoding in config.evaluate.decoding
    ]
    return write_results(
        output_dir,
        Measurement(
            config,
            model_name,
            model_ref,
            measured,
            (COPIER, rows[COPIER]),
            work.usage,
            reference_fresh=asked_afresh is not None if isinstance(judge, FreshJudge) else None,
        ),
    )


def _afresh(config: RecipeConfig, judge: Judge, mark: str) -> Judge | None:
    """The judge as it answers what it has been asked before; None where it shall not."""
    if not mark or not config.evaluate.fresh_reference or not isinstance(judge, FreshJudge):
        return None
    return judge.fresh(mark)


def load_generator(
    config: RecipeConfig, model_ref: str, reporter: BatchReporter
) -> tuple[Generator, Any]:
    """A generator over the model, on the device that the configuration asks for."""
    from refiner_core.generation.load import device_for, load_model, load_tokenizer, set_threads
    from refiner_core.generation.transformers_backend import TransformersGenerator

    set_threads(config.model)
    tokenizer = load_tokenizer(model_ref, config.model)
    model = load_model(model_ref, config.model).to(device_for(config.evaluate.resources))
    on_step = reporter.turn if config.environment.name else reporter.step
    generator = TransformersGenerator(
        model, tokenizer, batch_size=config.evaluate.batch_size, on_step=on_step
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


class _Work:
    """Units one after the other, from the newest checkpoint on."""

    def __init__(
        self, units: Sequence[_Unit], scorer: _Scorer, io: StageIO, reporter: BatchReporter
    ) -> None:
        self.units, self.scorer, self.io, self.reporter = units, scorer, io, reporter
        self.rows: dict[str, list[dict[str, Any]]] = {unit.key: [] for unit in units}
        self.done = 0
        self.sampled: dict[int, tuple[_Answer, ...]] = {}
        self.usage_before: JudgeUsage | None = None
        if (checkpoint := io.latest_checkpoint()) is not None:
            self._restore(checkpoint)
        self._usage_at_start = usage_of(scorer.judge)

    @property
    def usage(self) -> JudgeUsage | None:
        """What the judge has done for this evaluation; None where it keeps no count."""
        now = usage_of(self.scorer.judge)
        if self._usage_at_start is None or now is None:
            return self.usage_before
        used = usage_between(self._usage_at_start, now)
        return usage_sum(self.usage_before, used) if self.usage_before else used

    def run(self) -> dict[str, list[dict[str, Any]]]:
        """Rows by decoding (and the copier's)."""
        begun: _Begun | None = None
        for number, unit in enumerate(self.units[self.done :], start=self.done + 1):
            if self.io.should_stop():
                self._finish(begun)
                raise Interrupted(
                    f"The evaluation stopped after {self.done} of {len(self.units)} batches",
                    fix="run the same command again to go on",
                )
            self.reporter.batch(self.done, unit.key)
            before, begun = begun, self._begin(number, unit)
            self._finish(before)
            if not begun.judging or number == len(self.units):
                self._finish(begun)
                begun = None
        self.reporter.batch(len(self.units), "numbers")
        return self.rows

    def _begin(self, number: int, unit: _Unit) -> _Begun:
        """A unit whose answers are there: of an earlier attempt, or sampled now."""
        if (answers := self.sampled.get(number)) is not None:
            return self.scorer.again(unit, answers)
        begun = self.scorer.begin(unit)
        self.sampled[number] = begun.answers
        if begun.judging and unit.decoding is not None:
            self._save()  # else it is judged within the moment, and kept then
        return begun

    def _finish(self, begun: _Begun | None) -> None:
        """Wait for a unit's judgements, and keep it."""
        if begun is None:
            return
        self.rows[begun.unit.key] += self.scorer.finish(begun, self.reporter)
        self.done += 1
        del self.sampled[self.done]
        if self.done < len(self.units):
            self._save()

    def _save(self) -> None:
        """A checkpoint. Its step counts units that are sampled and units that are judged."""
        with self.io.new_checkpoint(2 * self.done + len(self.sampled)) as folder:
            _write(folder / _ROWS_FILE, self.rows)
            waiting = [[a.kept() for a in self.sampled[n]] for n in sorted(self.sampled)]
            _write(folder / _SAMPLED_FILE, {"judged": self.done, "waiting": waiting})
            if (usage := self.usage) is not None:
                _write(folder / _USAGE_FILE, usage_to_json(usage))

    def _restore(self, checkpoint: SavedCheckpoint) -> None:
        self.rows = _read(checkpoint.path / _ROWS_FILE)
        self.done = checkpoint.step
        if (checkpoint.path / _SAMPLED_FILE).exists():  # not in checkpoints of older versions
            kept = _read(checkpoint.path / _SAMPLED_FILE)
            self.done = kept["judged"]
            for number, answers in enumerate(kept["waiting"], start=self.done + 1):
                self.sampled[number] = _answers(self.units[number - 1], answers)
        if (checkpoint.path / _USAGE_FILE).exists():
            self.usage_before = usage_from_json(_read(checkpoint.path / _USAGE_FILE))


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _answers(unit: _Unit, kept: Sequence[Sequence[Any]]) -> tuple[_Answer, ...]:
    """A unit's answers, as an earlier attempt has kept them."""
    prompts = {prompt.sample_id: prompt for prompt in unit.prompts}
    return tuple(_Answer(prompts[sample_id], *rest) for sample_id, *rest in kept)


@dataclass(frozen=True)
class _Begun:
    """A unit whose answers are there. ``judging``: the judge works on them by itself."""

    unit: _Unit
    answers: tuple[_Answer, ...]
    stream: RewardStream

    @property
    def judging(self) -> bool:
        return self.stream.streams


class _Scorer:
    """Samples and scores units."""

    def __init__(
        self,
        config: RecipeConfig,
        judge: Judge,
        reference_judge: Judge,
        generator: Generator,
        tokenizer: Any,
    ) -> None:
        self.config, self.judge, self.reference_judge = config, judge, reference_judge
        self.generator, self.tokenizer = generator, tokenizer

    def begin(self, unit: _Unit) -> _Begun:
        """Sample a unit's answers; a judge that streams begins with each as it is finished."""
        stream = self._stream(unit)
        if unit.decoding is None:
            answers = self._copied(unit, stream)
        else:
            answers = self._sampled(unit, unit.decoding, stream)
        return _Begun(unit, tuple(answers), stream)

    def again(self, unit: _Unit, answers: tuple[_Answer, ...]) -> _Begun:
        """A unit whose answers an earlier attempt has sampled."""
        stream = self._stream(unit)
        for place, answer in enumerate(answers):
            _ask(stream, place, answer)
        return _Begun(unit, answers, stream)

    def _stream(self, unit: _Unit) -> RewardStream:
        judge = self.reference_judge if unit.decoding is None else self.judge
        return RewardStream(self.config.reward, judge)

    def finish(self, begun: _Begun, reporter: BatchReporter) -> list[dict[str, Any]]:
        """One row per sample, in order of (prompt, sample)."""
        results = begun.stream.results(reporter.judged)
        require_scored(results, self.config.judge.max_failed_share, of="answers")
        return [
            sample_row(
                a.prompt,
                a.index,
                a.text,
                length_tokens=a.length_tokens,
                stopped=a.stopped,
                result=result,
            )
            for a, result in zip(begun.answers, results, strict=True)
        ]

    def _sampled(self, unit: _Unit, decoding: Decoding, stream: RewardStream) -> list[_Answer]:
        evaluate = self.config.evaluate
        samples = evaluate.num_samples if decoding == "sampled" else 1
        places = [(prompt, index) for prompt in unit.prompts for index in range(samples)]
        requests = [
            GenerationRequest(
                prompt.prompt_ids,
                derive_seed(evaluate.seed, "evaluate", decoding, prompt.sample_id, index),
            )
            for prompt, index in places
        ]
        answers: dict[int, _Answer] = {}

        def finished(place: int, completion: Completion) -> None:
            prompt, index = places[place]
            answers[place] = _Answer(
                prompt,
                index,
                completion_text(self.tokenizer, completion),
                len(completion.token_ids),
                completion.finish_reason == "stop",
            )
            _ask(stream, place, answers[place])

        self.generator.generate(requests, sampling_params(self.config, decoding), finished)
        if len(answers) != len(places):
            raise RuntimeError(f"the generator told of {len(answers)} of {len(places)} samples")
        return [answers[place] for place in range(len(places))]

    def _copied(self, unit: _Unit, stream: RewardStream) -> list[_Answer]:
        answers = []
        for place, prompt in enumerate(unit.prompts):
            seed = derive_seed(self.config.evaluate.seed, COPIER, prompt.sample_id)
            text = random_copier(prompt.prompt_text, random.Random(seed))
            length = len(self.tokenizer.encode(text, add_special_tokens=False))
            answers.append(_Answer(prompt, 0, text, length, stopped=True))
            _ask(stream, place, answers[-1])
        return answers


def _ask(stream: RewardStream, place: int, answer: _Answer) -> None:
    stream.add(RewardInput(answer.prompt, answer.text, answer.stopped), place)
    stream.submit()
