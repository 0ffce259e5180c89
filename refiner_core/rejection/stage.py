"""The stage ``sample``: a model's own attempts at the training prompts, of which good ones are
kept.

In: ``data_dir/rl_train.parquet`` (prompts, or tasks if the recipe has an environment), a model.
Out, in ``output_dir``:

=========================== =======================================================================
``sft_train.parquet``       the kept attempts as demonstrations: exactly the sampled tokens, with
                            loss on the model's own and on the ends of its turns
``attempts.parquet``        every attempt, its value, and the reason for keeping or dropping it
``report.json``             counts, :class:`~refiner_core.rejection.attempts.RejectionReport`
=========================== =======================================================================

There is no validation set: attempts at the same prompts on both sides would measure memorisation.

Seeds derive from the run's seed, the prompt and the number of the attempt, so that further attempts
or prompts change no others.

An answer's score is its reward as a share of the highest possible one for its prompt
(:func:`highest_reward`): without evidence in the prompt there is no citation reward, and with
``combination: additive`` the reward may exceed ``reward.verification_reward``. The share is clipped
to [0, 1] (``signed_mean`` and ``positive_sum`` go below 0). A prompt whose highest reward is 0 (no
rubric and no evidence) gives no information: its attempts are ``no_reward`` and never kept.

An episode's score is its environment's reward, its partial score the weighted share of passed
checks. One that ended with a turn without a tool call, or at a limit of turns or tokens, is never
kept, whatever it did before: the model would learn that ending. Errors of the infrastructure
are no attempts; above ``environment.max_error_share`` of a batch the stage stops, resumable.

A batch is sampled whole or not at all: the same batch gives the same bits. Episodes of an eager
schedule are not reproducible anyway, and their users may cost money: there every finished episode
is kept, and an interrupted batch continues with the missing ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from refiner_core.batches import BatchWork, worked
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.files import replacing
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.types import (
    Completion,
    DemonstrationRow,
    Generator,
    Judge,
    PromptRow,
    RewardResult,
    SamplingParams,
    StageIO,
)
from refiner_core.data.prepared import load_prompts, write_demonstrations
from refiner_core.environments.conversation import turn_template
from refiner_core.environments.episode_runner import EpisodeSettings
from refiner_core.environments.episodes import settings_of
from refiner_core.environments.protocol import (
    Environment,
    EpisodeRecord,
    domain_of_id,
    record_from_json,
)
from refiner_core.environments.registry import open_environment
from refiner_core.environments.scoring import require_episodes
from refiner_core.generation.completions import closing_ids, completion_text
from refiner_core.judges.context import usage_to_json
from refiner_core.rejection.attempts import (
    Flaw,
    RejectionAttempt,
    RejectionReport,
    batch_metrics,
    choose,
    load_attempts,
    require_kept,
    write_attempts,
    writing_attempts,
)
from refiner_core.rewards import RewardInput, RewardStream, require_scored
from refiner_core.rewards.compute import highest_reward
from refiner_core.samples import (
    BatchReporter,
    OpenServers,
    PlannedSample,
    check_fit,
    sample_answers,
    sample_episodes,
)


@dataclass(eq=False, kw_only=True)
class _Attempts(BatchWork[RejectionAttempt]):
    """Batches of episodes if there is an environment, else of answers."""

    what, suffix = "Sampling", ".parquet"
    environment: Environment | None

    def __post_init__(self) -> None:
        if self.environment is None and self.judge is None:
            raise ValueError("answers are scored by a judge, but none is given")
        self._spent: dict[int, tuple[int, float]] = {}  # batch: tokens sampled now, seconds
        super().__post_init__()

    @property
    def keeps_parts(self) -> bool:
        """True for episodes of an eager schedule."""
        return self.environment is not None and not self._settings(self.environment).ordered

    @property
    def save_freq(self) -> int:
        """Batches between checkpoints."""
        return self.config.sample.save_freq

    @property
    def _sampling(self) -> SamplingParams:
        rule, grpo = self.config.sample, self.config.grpo
        lengths = (grpo.response_length, grpo.stop_strings)
        return SamplingParams(rule.temperature, rule.top_p, rule.top_k, *lengths)

    def key(self, sample: RejectionAttempt) -> tuple[str, int]:
        """Id of its prompt, and its number."""
        return sample.key

    def failed(self, sample: RejectionAttempt) -> bool:
        """True if it was ended by the infrastructure."""
        return sample.status == "error"

    def rewards(self, number: int) -> RewardStream | None:
        """Rewards of answers from the judge."""
        if self.environment is not None or self.judge is None:
            return None
        return RewardStream(self.config.reward, self.judge)

    def answer(self, wanted: PlannedSample, sample: RejectionAttempt) -> RewardInput:
        """An answer as input of the reward."""
        return RewardInput(wanted.prompt, sample.text, sample.ended == "stop")

    def sample(
        self,
        number: int,
        wanted: Sequence[PlannedSample],
        finished: Callable[[RejectionAttempt], None],
    ) -> None:
        """Sample the requested attempts of a batch."""
        environment = self.environment
        tokens, started = 0, time.perf_counter()

        def ended(place: int, completion: Completion) -> None:
            nonlocal tokens
            attempt = self._attempt(wanted[place], completion)
            tokens += attempt.sampled_tokens
            finished(attempt)

        if environment is not None:
            sample_episodes(
                *(self.generator, wanted, environment, self.tokenizer),
                *(self._settings(environment), ended),
                should_stop=self.io.should_stop if self.keeps_parts else None,
            )
        else:
            context = self.config.grpo.max_token_length
            sample_answers(self.generator, wanted, self._sampling, ended, context=context)
        self._spent[number] = (tokens, time.perf_counter() - started)

    def scored(
        self, number: int, samples: list[RejectionAttempt], results: Sequence[RewardResult] | None
    ) -> list[RejectionAttempt]:
        """Score the attempts, and select the kept ones."""
        if results is None:
            self._require(samples)
        else:
            require_scored(results, self.config.judge.max_failed_share, of="attempts")
            scored = zip(self.batches[number - 1], samples, results, strict=True)
            samples = [self._scored(*one) for one in scored]
        rule = self.config.sample
        size = rule.attempts
        groups = [samples[first : first + size] for first in range(0, len(samples), size)]
        return [attempt for group in groups for attempt in choose(group, rule)]

    def finished(self, number: int, rows: list[RejectionAttempt]) -> None:
        """Log a batch's metrics."""
        tokens, seconds = self._spent.pop(number)
        speed = {"tokens_per_second": tokens / seconds} if tokens and seconds else {}
        times = {"time/generate_s": seconds, **speed}
        self.io.log_metrics(self.step, batch_metrics(number, rows) | times)

    def write(self, path: Path, rows: Sequence[RejectionAttempt]) -> None:
        """Write attempts to a file."""
        write_attempts(path, rows)

    def read(self, path: Path) -> list[RejectionAttempt]:
        """Read attempts from a file."""
        return load_attempts(path)

    def _settings(self, environment: Environment) -> EpisodeSettings:
        return settings_of(self.config, environment, self._sampling)

    def _attempt(self, wanted: PlannedSample, completion: Completion) -> RejectionAttempt:
        if self.environment is not None:
            return _episode_attempt(wanted, completion)
        closing = closing_ids(self.tokenizer, completion)
        own = (True,) * len(completion.token_ids) + (False,) * len(closing)
        return RejectionAttempt(
            sample_id=wanted.prompt.sample_id,
            domain=wanted.prompt.refiner_mode,
            index=wanted.number,
            seed=wanted.seed,
            token_ids=completion.token_ids + closing,
            own=own if closing else None,
            text=completion_text(self.tokenizer, completion),
            ended=completion.finish_reason,
        )

    def _scored(
        self, wanted: PlannedSample, attempt: RejectionAttempt, result: RewardResult
    ) -> RejectionAttempt:
        highest = highest_reward(wanted.prompt, self.config.reward)
        total = result.total
        share = None if total is None or highest <= 0 else min(1.0, max(0.0, total / highest))
        return replace(
            attempt,
            status=result.status,
            flaw=_answer_flaw(attempt, result, highest),
            score=share,
            partial=share,
            reward=total,
            components=dict(result.components),
            detail=[dict(judgement) for judgement in result.judgements],
        )

    def _require(self, made: Sequence[RejectionAttempt]) -> None:
        """Raise :class:`EnvironmentOutage` if too many attempts ended by errors."""
        errors = [(a.error_kind, a.error) for a in made if a.status == "error"]
        share = self.config.environment.max_error_share
        require_episodes(errors, len(made), share, of="episodes of a batch")

    def demonstration(self, prompt: PromptRow, attempt: RejectionAttempt) -> DemonstrationRow:
        """A kept attempt as a demonstration: loss on the model's own tokens and on the token that
        ends an answer or a turn; tokens after the last turn are dropped."""
        before, ids = prompt.prompt_ids, attempt.token_ids
        loss: tuple[bool, ...] = (True,) * len(ids)
        if self.environment is not None:
            end = tuple(turn_template(self.tokenizer).end_of_turn)
            room = self.config.grpo.max_token_length - len(before)
            ids, loss = with_ends_of_turns(ids, attempt.own or loss, end, room)
        name = f"{attempt.sample_id}#{attempt.index}"  # ids of tasks start with their domain
        return DemonstrationRow(name, before + ids, (False,) * len(before) + loss)


def batches_of(config: RecipeConfig, prompts: Sequence[PromptRow]) -> list[list[PlannedSample]]:
    """All attempts, in order: batches of whole prompts."""
    rule = config.sample
    size = max(1, rule.generation_batch_size // rule.attempts)
    return [
        [
            PlannedSample(p, i, derive_seed(config.seed, "sample", p.sample_id, i))
            for p in prompts[first : first + size]
            for i in range(rule.attempts)
        ]
        for first in range(0, len(prompts), size)
    ]


def _answer_flaw(attempt: RejectionAttempt, result: RewardResult, highest: float) -> Flaw:
    if result.status == "unscored":
        return "unscored"
    if attempt.ended != "stop":
        return "truncated"
    if result.status == "malformed":
        return "malformed"
    return "" if highest > 0 else "no_reward"


def _episode_attempt(wanted: PlannedSample, completion: Completion) -> RejectionAttempt:
    record = record_from_json(completion.episode or {})
    flaw = _episode_flaw(record)
    status: Any = "scored" if flaw in ("", "truncated") else flaw
    return RejectionAttempt(
        sample_id=wanted.prompt.sample_id,
        domain=domain_of_id(wanted.prompt.sample_id),
        index=wanted.number,
        seed=wanted.seed,
        token_ids=completion.token_ids,
        own=completion.own,
        text="\n".join(turn.text for turn in record.turns),
        ended=record.ended,
        status=status,
        flaw=flaw,
        score=record.reward,
        partial=record.partial,
        reward=record.reward,
        tools=record.tools,
        components=dict(record.components),
        detail=_without_times(record),
        error_kind=record.error_kind,
        error=record.error,
    )


def with_ends_of_turns(
    ids: Sequence[int], own: Sequence[bool], end: tuple[int, ...], room: int
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Tokens of an episode up to the end of the model's last turn, and their loss mask:
    the model's own, and ``end`` after each of its turns.

    A turn is sampled up to ``</tool_call>``, and the template ends it; a model that is always
    cut off there would not learn to end its turn. A missing end of the last turn is appended
    if the total is at most ``room`` tokens: a pack holds as much as a context.
    Shapes: one value per token.
    """
    length = max((place + 1 for place, is_own in enumerate(own) if is_own), default=0)
    loss = list(own)
    for place in range(1, length):
        if own[place - 1] and not own[place] and tuple(ids[place : place + len(end)]) == end:
            loss[place : place + len(end)] = [True] * len(end)
    kept = tuple(ids[:length])
    missing = () if kept[-len(end) :] == end or length + len(end) > room else end
    return kept + missing, (*loss[:length], *(True for _ in missing))


def _without_times(record: EpisodeRecord) -> dict[str, Any]:
    """The record without durations, so that equal episodes are bitwise equal."""
    values = record.as_json()
    turns = [{k: v for k, v in turn.items() if k != "seconds"} for turn in values["turns"]]
    return values | {"turns": turns}


def _episode_flaw(record: EpisodeRecord) -> Flaw:
    if record.status == "error":
        return "error"
    if record.ended == "no_call":
        return "malformed"
    return "truncated" if record.ended in ("turn_limit", "context_limit") else ""


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
    open_servers: OpenServers | None = None,
) -> dict[str, Any]:
    """Sample ``sample.attempts`` attempts at every training prompt, and keep the good ones.

    Parameters
    ----------
    data_dir
        The data stage's folder; ``rl_train.parquet`` is read.
    model_ref
        Reference for :func:`refiner_core.generation.load.load_model`.
    judge
        Scores answers; in an agent's recipe only assertions in plain language.
    generator, tokenizer, environment
        Made from ``model_ref`` and the recipe if not given.
    open_servers
        Starts servers instead of loading a model in this process.

    Returns
    -------
    dict
        The content of ``report.json``.

    Raises
    ------
    DataError
        There are no prompts, or no attempt is kept.
    Interrupted
        A stop was requested; finished batches are kept.
    JudgeOutage, EnvironmentOutage
        Too many attempts of a batch have no score; the same is kept.
    """
    prompts = _prompts(config, data_dir / "rl_train.parquet")
    batches = batches_of(config, prompts)
    if config.environment.name and environment is None:
        environment = open_environment(config, evaluation=False, judge=judge)
    reporter = BatchReporter(io, len(batches), "attempts")
    with worked(
        *(_Attempts, config, model_ref, batches),
        resources=config.sample.resources,
        batch_size=config.sample.generation_batch_size,
        reporter=reporter,
        output_dir=output_dir,
        window=config.grpo.max_token_length,
        generator=generator,
        tokenizer=tokenizer,
        open_servers=open_servers,
        judge=judge,
        environment=environment,
    ) as work:
        reporter.batch(reporter.total, "write")
        report = _write(output_dir, work)
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
    check_fit(prompts, config.grpo)
    return prompts


def _write(output_dir: Path, work: _Attempts) -> dict[str, Any]:
    """Write all files, with one batch in memory at a time besides the kept attempts."""
    name = "answers" if work.environment is None else "episodes"
    tally, kept = RejectionReport(work.config.sample, name), list[DemonstrationRow]()
    with writing_attempts(output_dir / "attempts.parquet") as write:
        for number, wanted in enumerate(work.batches, start=1):
            attempts = work.rows(number)
            write(attempts)
            tally.add(attempts)
            both = zip(wanted, attempts, strict=True)
            kept += [work.demonstration(one.prompt, a) for one, a in both if a.kept]
    report = tally.as_json()
    report["tokens"] |= {"loss": sum(sum(row.loss_mask) for row in kept)}
    report["longest"] = max((len(row.input_ids) for row in kept), default=0)
    if (usage := work.usage()) is not None:
        report["judge"] = usage_to_json(usage)
    write_demonstrations(output_dir / "sft_train.parquet", kept)
    with replacing(output_dir / "report.json") as file:
        file.write(json.dumps(report, ensure_ascii=False, indent=1).encode())
    return report
