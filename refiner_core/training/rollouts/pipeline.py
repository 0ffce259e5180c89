"""Pipeline of rollout batches: the schedule of sampling, and the weights of each batch.

In: prompts, a policy, a judge (on rank 0). Out: for each step its rollouts with their results, on
rank 0; the other ranks know their number.

The schedule is a function of the step. With ``async_steps`` k, the batch of step t is sampled with
the weights after max(0, t - 1 - k) steps::

    k = 1   step t:  take t ─ sync ─ begin t+1 ─ judge t ─ update t        (t+1 is sampled in a
                                          └── sampled in a thread ────>      thread meanwhile)
    k = 0   step t:  sync ─ sample t ─ judge t ─ update t

A sync waits until sampling ends, so weights never change during a sample; the judge may lag
behind. Results never depend on speed. With k = 2 a batch has one more step until it is
needed, which hides a slow judge, not a slow sampler.

Every rank samples its share of the prompts (or rank 0 uses servers). Ranks communicate from the
main thread only, in the order of steps. Rank 0 collects, and submits to the judge: its own samples
as they finish, the others' once they are collected.

With active sampling a batch is *settled* in rounds: while too few groups have differing rewards,
further prompts are sampled with the same weights, before the next sync.

A batch whose weights are older than ``async_steps`` (a checkpoint of other settings) is dropped,
counted, and sampled again with the newest. So is a batch that lost too many episodes to
environment errors: it ends the stage, no checkpoint includes it, and the next attempt samples it
again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import (
    EnvironmentOutage,
    Interrupted,
    JudgeOutage,
    StageFailed,
    WorkspaceError,
)
from refiner_core.contract.types import Completion, PromptRow, RewardResult
from refiner_core.generation.load import set_threads
from refiner_core.rewards import RewardStream
from refiner_core.samples import PlannedSample
from refiner_core.training.batches import permutation, prompt_batch
from refiner_core.training.engines.protocol import Engine
from refiner_core.training.ranks import on_first
from refiner_core.training.rollouts.policies import Policy
from refiner_core.training.rollouts.rollout import RolloutSample
from refiner_core.training.rollouts.single_turn import SingleTurnTask
from refiner_core.training.steps.checkpoint_manager import StepTimer, Tell

#: Name of the checkpoint file, and version of its format.
IN_FLIGHT = "in_flight.json"
FORMAT_VERSION = 1


@dataclass
class SamplingRound:
    """Prompts that are sampled together: the only round of a step, except with active sampling.

    ``made`` has this rank's own completions by place, and ``read`` their samples on rank 0;
    ``samples`` is complete on rank 0 once all are collected, and ``results`` once they are judged.
    """

    indices: tuple[int, ...]
    wanted: list[PlannedSample]
    made: dict[int, Completion] = field(default_factory=dict)
    read: dict[int, RolloutSample] = field(default_factory=dict)
    future: Future[None] | None = None
    collected: bool = False
    samples: list[RolloutSample] = field(default_factory=list)
    rewards: RewardStream | None = None
    results: list[RewardResult] | None = None


@dataclass
class PendingBatch:
    """A step's batch of rollouts, from its first prompt to its update.

    ``version`` counts the training steps of the weights that sampled it; ``epoch`` and ``cursor``
    give the data position after its last prompt. ``settled``: active sampling is finished;
    ``cut_short``: an error ended it. ``lost``: too many of its episodes ended by infrastructure
    errors; no checkpoint includes it, and it is sampled again.
    """

    step: int
    version: int
    epoch: int
    cursor: int
    rounds: list[SamplingRound] = field(default_factory=list)
    settled: bool = False
    cut_short: bool = False
    lost: bool = False
    seconds: float = 0.0

    @property
    def age(self) -> int:
        """Training steps between the weights that sampled it and those that it will train."""
        return self.step - 1 - self.version

    @property
    def size(self) -> int:
        """Number of samples on all ranks."""
        return sum(len(part.wanted) for part in self.rounds)

    @property
    def samples(self) -> list[RolloutSample]:
        """Samples of all rounds, on rank 0."""
        return [sample for part in self.rounds for sample in part.samples]

    @property
    def results(self) -> list[RewardResult]:
        """Results of all rounds, on rank 0, once they are judged."""
        return [result for part in self.rounds for result in part.results or ()]


def to_bytes(pending_batches: Sequence[PendingBatch]) -> bytes:
    """Sampled batches in the format of a checkpoint."""
    value = {"format": FORMAT_VERSION, "flights": [_pending_to_json(f) for f in pending_batches]}
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _pending_to_json(pending: PendingBatch) -> dict[str, Any]:
    rounds = [
        {
            "prompts": list(part.indices),
            "samples": [_completion(sample.completion) for sample in part.samples],
            "results": None if part.results is None else [vars(r) for r in part.results],
        }
        for part in pending.rounds
    ]
    names = ("step", "version", "epoch", "cursor", "settled")
    return {**{name: getattr(pending, name) for name in names}, "rounds": rounds}


def _completion(completion: Completion) -> list[Any]:
    """Tokens, log-probabilities and end reason; for an episode also the mask of own tokens and the
    record."""
    plain = [list(completion.token_ids), list(completion.logprobs), completion.finish_reason]
    if completion.own is None:
        return plain
    logprobs = [
        p if own else None for p, own in zip(completion.logprobs, completion.own, strict=True)
    ]
    return [plain[0], logprobs, plain[2], [int(own) for own in completion.own], completion.episode]


def _completion_again(
    token_ids: list[int],
    logprobs: list[float | None],
    reason: Literal["stop", "length"],
    own: list[int] | None = None,
    episode: Mapping[str, Any] | None = None,
) -> Completion:
    whose = None if own is None else tuple(bool(value) for value in own)
    known = tuple(math.nan if p is None else p for p in logprobs)
    return Completion(tuple(token_ids), known, reason, whose, episode)


T = TypeVar("T")
#: Interval of progress messages while waiting for samples, seconds.
_TICK_S = 1.0


class Pipeline:
    """The batches in flight of one training run.

    Parameters
    ----------
    lane
        How rollouts are sampled, rewarded and grouped. Only rank 0 rewards.
    tell
        Called with (part of a step, samples done, samples in all) during long operations.
    """

    def __init__(
        self,
        config: RecipeConfig,
        prompts: Sequence[PromptRow],
        engine: Engine,
        policy: Policy,
        turn_task: SingleTurnTask,
        tell: Tell,
    ) -> None:
        self.config, self.grpo, self.prompts = config, config.grpo, prompts
        self.engine, self.policy, self.ranks = engine, policy, engine.ranks
        self.turn_task = turn_task
        self._tell = tell
        self.behind = config.grpo.async_steps
        self.last = config.grpo.num_training_steps
        self.pending_batches: dict[int, PendingBatch] = {}
        self.dropped_stale = 0
        self._position = (0, 0)  # epoch and cursor after the last prompt that was drawn
        self._sent = False  # whether this process has sent weights yet
        self._thread: ThreadPoolExecutor | None = None
        if self.behind and not policy.beside:
            raise ValueError("this policy cannot sample while the engine trains")

    # ------------------------------------------------------------ a step's rollouts

    def begin(self, step: int, position: tuple[int, int], kept: bytes | None, where: str) -> None:
        """Resume after ``step`` steps, with the checkpoint's batches for later ones."""
        pending_batches = [] if kept is None else self._from_bytes(kept, where)
        self._position = max([position, *((f.epoch, f.cursor) for f in pending_batches)])
        for pending in pending_batches:
            if pending.age > self.behind:
                self.dropped_stale += pending.size
            else:
                self.pending_batches[pending.step] = pending

    def take(self, step: int, clock: StepTimer) -> PendingBatch:
        """The batch of ``step``, sampled; with active sampling also judged.

        Raises
        ------
        StageFailed
            The policy still samples with outdated weights.
        """
        self._begin_missing(step, clock)
        more = self.behind and step + self.behind <= self.last
        for pending in [
            self.pending_batches[s] for s in sorted(self.pending_batches) if more or s == step
        ]:
            self._finish(pending, clock)
        pending = self.pending_batches[step]
        if pending.age > self.behind:
            raise StageFailed(
                f"grpo step {step}: rollouts are sampled with the weights of step "
                f"{pending.version}, {pending.age} steps behind",
                expected=f"weights at most {self.behind} steps behind (grpo.async_steps)",
                fix="check the sampler: it does not load new weights",
            )
        return pending

    def ahead(self, step: int, clock: StepTimer) -> None:
        """Start the sampling allowed while ``step`` trains, with the weights before its update."""
        later = step + self.behind
        if self.behind and later <= self.last and later not in self.pending_batches:
            self._sync(step - 1, clock)
            self._start(later, clock)

    def judge(self, pending: PendingBatch, clock: StepTimer) -> None:
        """Wait for all its results (on rank 0).

        Raises
        ------
        JudgeOutage, Interrupted, EnvironmentOutage
            See :meth:`refiner_core.contract.types.Judge.judge`, and :meth:`SingleTurnTask.require`.
        """
        with clock.time("judge"):
            for part in pending.rounds:
                self._judge_round(pending, part)

    def sample_aside(
        self, wanted: list[PlannedSample], step: int, clock: StepTimer
    ) -> list[RolloutSample]:
        """Samples of the weights after ``step``, apart from the batches: complete on rank 0, and
        empty on the others. Batches in flight end first, with the weights that they began with."""
        for pending in self._after(step):
            self._finish(pending, clock)
        self._sync(step, clock)
        part, apart = SamplingRound((), wanted), PendingBatch(step, step, 0, 0)
        self._run(partial(self._work, apart, part, self._share(part)), part)
        self._collect(part, clock)
        return part.samples

    def done(self, step: int) -> None:
        """Drop the batch of a finished step."""
        self.pending_batches.pop(step, None)
        self.dropped_stale = 0

    # ------------------------------------------------------------ checkpoints

    def savable(self, step: int) -> bool:
        """True if the state after ``step`` can be saved: not if active sampling was cut short,
        since its next round needs weights that no checkpoint has."""
        return not any(pending.cut_short for pending in self._after(step))

    def dump(self, step: int, *, judged: bool) -> Mapping[str, bytes]:
        """The file with the batches in flight after ``step``; waits until they are sampled, and
        with ``judged`` until they are judged, if the judge responds. All ranks call it together."""
        pending_batches, clock = self._after(step), StepTimer()
        for pending in pending_batches:
            self._finish(pending, clock)
            if judged:
                try:
                    self.judge(pending, clock)
                except (JudgeOutage, EnvironmentOutage, Interrupted):
                    # Requested again when the results are needed.
                    judged = False
        if not pending_batches or self.ranks.rank > 0:
            return {}
        return {IN_FLIGHT: to_bytes(pending_batches)}

    def close(self) -> None:
        """Stop the sampling and the thread."""
        if self._thread is not None:
            self.policy.cancel()
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    def _from_bytes(self, data: bytes, where: str) -> list[PendingBatch]:
        """Batches from a checkpoint's file.

        Raises
        ------
        WorkspaceError
            The file has another format.
        """
        try:
            value = json.loads(data)
            if value["format"] != FORMAT_VERSION:
                raise ValueError(f"format {value['format']}")
            return [self._pending_from_json(each) for each in value["flights"]]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise WorkspaceError(
                f"{IN_FLIGHT} of {where} cannot be read ({type(error).__name__}: {error})",
                expected=f"rollouts in flight, format {FORMAT_VERSION}",
                fix="remove the checkpoint to resume from the previous one",
            ) from error

    def _pending_from_json(self, value: Mapping[str, Any]) -> PendingBatch:
        pending = PendingBatch(value["step"], value["version"], value["epoch"], value["cursor"])
        pending.settled = value["settled"]
        for part in value["rounds"]:
            wanted = self.turn_task.wanted(self.prompts, pending.step, part["prompts"])
            pairs = zip(wanted, part["samples"], strict=True)
            samples = [self._read(one, _completion_again(*values)) for one, values in pairs]
            results = part["results"]
            made = None if results is None else [RewardResult(**result) for result in results]
            indices = tuple(part["prompts"])
            pending.rounds.append(
                SamplingRound(indices, wanted, collected=True, samples=samples, results=made)
            )
        return pending

    def _after(self, step: int) -> list[PendingBatch]:
        later = (self.pending_batches.get(s) for s in range(step + 1, step + self.behind + 1))
        return [pending for pending in later if pending is not None and not pending.lost]

    # ------------------------------------------------------------ beginning

    def _begin_missing(self, step: int, clock: StepTimer) -> None:
        """Start missing batches with the newest weights: at the start, or after a smaller
        checkpoint."""
        due = range(step, min(step + max(1, self.behind), self.last + 1))
        missing = [s for s in due if s not in self.pending_batches]
        if missing:
            self._sync(step - 1, clock)
        for later in missing:
            if self.grpo.active_sampling:  # its first prompt depends on the batches before
                for s in sorted(self.pending_batches):
                    self._finish(self.pending_batches[s], clock)
            self._start(later, clock)

    def _sync(self, version: int, clock: StepTimer) -> None:
        with clock.time("wait"):
            for s in sorted(self.pending_batches):
                for part in self.pending_batches[s].rounds:
                    self._wait(part)
        if self._sent and self.policy.version == version:  # it already has these weights
            return
        with clock.time("sync"):
            self.policy.sync(self.engine, version)
        self._sent = True

    def _start(self, step: int, clock: StepTimer) -> None:
        pending = PendingBatch(step, self.policy.version, *self._position)
        if self.grpo.active_sampling:
            indices = self._draw(self.grpo.num_unique_prompts_rollout, pending)
        else:
            per_step = self.grpo.num_unique_prompts_rollout
            epoch, cursor, indices = prompt_batch(
                self.config.seed, len(self.prompts), per_step, step - 1
            )
            self._position = (epoch, cursor + len(indices))
        self._sample(pending, indices, clock, beside=self.behind > 0)
        self.pending_batches[step] = pending

    def _draw(self, count: int, pending: PendingBatch) -> tuple[int, ...]:
        """The next ``count`` prompts that the batch does not have; fewer at the end of the data.

        A batch's first prompts come from one epoch, as without active sampling: a tail of an epoch
        that is too short for them is skipped.
        """
        total, (epoch, cursor) = len(self.prompts), self._position
        taken = {index for part in pending.rounds for index in part.indices}
        drawn: list[int] = []
        if not taken and cursor + count > total:
            epoch, cursor = epoch + 1, 0
        while len(drawn) < min(count, total - len(taken)):
            if cursor >= total:
                epoch, cursor = epoch + 1, 0
            index = permutation(total, self.config.seed, "prompts", epoch)[cursor]
            cursor += 1
            if index not in taken and index not in drawn:
                drawn.append(index)
        self._position = (epoch, cursor)
        return tuple(drawn)

    def _sample(
        self, pending: PendingBatch, indices: tuple[int, ...], clock: StepTimer, *, beside: bool
    ) -> None:
        """Sample a further round of a batch, in the thread or synchronously."""
        pending.epoch, pending.cursor = self._position
        part = SamplingRound(indices, self.turn_task.wanted(self.prompts, pending.step, indices))
        if self.ranks.rank == 0:
            part.rewards = self.turn_task.rewards(patient=self.behind > 0)
        pending.rounds.append(part)
        work = partial(self._work, pending, part, self._share(part))
        if beside:
            part.future = self._worker().submit(work)
            return
        self._tell("generate", 0, 0)
        with clock.time("generate"):
            self._run(partial(work, tell=True), part)

    def _run(self, work: Callable[[], None], part: SamplingRound) -> None:
        """Sample this rank's share now; its error is raised when the round is collected."""
        part.future = Future()
        try:
            with self.policy.ready():
                work()
            part.future.set_result(None)
        except Exception as error:
            part.future.set_exception(error)

    def _read(self, wanted: PlannedSample, completion: Completion) -> RolloutSample:
        return self.turn_task.read(self.engine.tokenizer, wanted, completion)

    def _share(self, part: SamplingRound) -> list[int]:
        """Places that this rank samples: whole groups, so that each prompt is encoded once."""
        rank, world = self.ranks.rank, self.ranks.world
        if not self.policy.every_rank:
            return list(range(len(part.wanted))) if rank == 0 else []
        size = self.grpo.num_samples_per_prompt_rollout
        return [place for place in range(len(part.wanted)) if place // size % world == rank]

    def _work(
        self,
        pending: PendingBatch,
        part: SamplingRound,
        places: Sequence[int],
        *,
        tell: bool = False,
    ) -> None:
        started = time.perf_counter()

        def finished(number: int, completion: Completion) -> None:
            place = places[number]
            if part.rewards is not None:
                part.read[place] = self._read(part.wanted[place], completion)
                self.turn_task.ask(part.rewards, {place: part.read[place]})
            part.made[place] = completion
            if tell:
                self._tell("generate", len(part.made), len(places))

        if places:
            wanted = [part.wanted[place] for place in places]
            self.turn_task.sample(self.policy, self.engine.tokenizer, wanted, finished)
        pending.seconds += time.perf_counter() - started

    def _worker(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(
                1, "refiner-rollouts", initializer=set_threads, initargs=(self.config.model,)
            )
        return self._thread

    # ------------------------------------------------------------ finishing

    def _finish(self, pending: PendingBatch, clock: StepTimer) -> None:
        """Collect a batch; with active sampling also settle it."""
        for part in pending.rounds:
            self._collect(part, clock)
        if self.grpo.active_sampling and not pending.settled:
            try:
                self._settle(pending, clock)
            except BaseException:
                pending.cut_short = True
                raise

    def _wait(self, part: SamplingRound) -> BaseException | None:
        """Wait for this rank's share; returns its error."""
        while part.future is not None:
            try:
                return part.future.exception(timeout=_TICK_S)
            except NotYet:
                self._tell("generate", len(part.made), len(part.wanted))
        return None

    def _collect(self, part: SamplingRound, clock: StepTimer) -> None:
        """Gather all ranks' samples on rank 0, once they are finished."""
        if part.collected:
            return
        with clock.time("wait"):
            error = self._wait(part)
            self.ranks.all_or_none(error)
            shares = self.ranks.gather(part.made)
        on_first(self.ranks, lambda: self._put_together(part, shares or []))
        part.future, part.made, part.read, part.collected = None, {}, {}, True

    def _put_together(
        self, part: SamplingRound, shares: Sequence[Mapping[int, Completion]]
    ) -> None:
        made = {place: completion for share in shares for place, completion in share.items()}
        part.samples = [
            part.read.get(place) or self._read(wanted, made[place])
            for place, wanted in enumerate(part.wanted)
        ]
        if part.rewards is not None:
            self.turn_task.ask(part.rewards, dict(enumerate(part.samples)))

    def _judge_round(self, pending: PendingBatch, part: SamplingRound) -> None:
        def ask() -> None:
            if part.results is not None:
                return
            rewards, part.rewards = part.rewards, None
            self._tell("judge", 0, 0)
            part.results = self.turn_task.results(
                rewards, part.samples, partial(self._tell, "judge")
            )

        try:
            on_first(self.ranks, ask)
        except EnvironmentOutage:
            pending.lost = True
            raise

    def _settle(self, pending: PendingBatch, clock: StepTimer) -> None:
        """Sample further prompts until enough groups have a spread of rewards."""
        grpo = self.grpo
        while True:
            with clock.time("judge"):
                self._judge_round(pending, pending.rounds[-1])
            kept = on_first(self.ranks, lambda: self._kept(pending))
            missing = grpo.num_unique_prompts_rollout - kept
            if missing <= 0 or len(pending.rounds) >= grpo.active_sampling_max_rounds:
                break
            if not (indices := self._draw(missing, pending)):
                break
            self._sample(pending, indices, clock, beside=False)
            self._collect(pending.rounds[-1], clock)
        pending.settled = True

    def _kept(self, pending: PendingBatch) -> int:
        batch = self.turn_task.groups(pending.samples, pending.results)
        return sum(group.dropped is None for group in batch.groups)
