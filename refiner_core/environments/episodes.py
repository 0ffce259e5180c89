"""Many concurrent episodes over one generator.

In: a generator, an environment, and tasks with their seeds. Out: one
:class:`~refiner_core.contract.types.Completion` per episode, as each ends: all tokens after the
prompt, the mask of the model's own, their log-probabilities, and the episode's record.

**A turn** is sampled up to ``</tool_call>`` and parsed
(:mod:`refiner_core.environments.turns`); its call is one ``step`` of the environment, in a thread,
while other episodes decode; the resulting messages are appended to the conversation
(:mod:`refiner_core.environments.conversation`), and the next turn may start.

**Repair.** A turn that is no call is sampled once more, at temperature 0, *in the same context*:
the first attempt is dropped from it, but kept in the record (``repaired``). So the context is
always the one that later tokens were conditioned on, a task does not depend on the wording of an
error message of refiner, and every later turn has the form of demonstrations. The costs: the model
gets no error message, and a greedy turn is no sample of the policy; its log-probabilities are those
at temperature 1. Training recognises such turns by ``repaired``. If the second attempt is no call
either, the *first* one's tokens stay as the model's own last turn: they are the policy's own
sample, and they failed. The episode ends (``no_call``, reward 0).

**Limits.** A turn is limited by ``turn_tokens`` and by the rest of the context. Messages of tools
and the user are appended whole or not at all: if they do not fit, the episode ends
(``context_limit``), as after ``max_turns`` (``turn_limit``). The environment values such an episode
as it stands; if it is no success, its failure is ``limit``.

**Time.** ``turn_timeout_s`` and ``episode_timeout_s`` count the environment's own work, not the
model's, and not the wait for a thread. A hanging tool is abandoned: its episode ends with an
error (``turn_timeout``), others continue, and the process can still exit. A failing user
simulator is an error as well
(:class:`~refiner_core.environments.protocol.InfrastructureError`). Such episodes do not count, and
are no failures of the model. Any other exception of an environment is a bug in it and ends the
call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, RefinerError, StageFailed
from refiner_core.contract.types import (
    Completion,
    Generator,
    SamplingParams,
    TurnGenerator,
    TurnRequest,
    Turns,
)
from refiner_core.environments.episode_runner import (
    EpisodeRequest,
    EpisodeRunner,
    EpisodeSettings,
    Stepped,
)
from refiner_core.environments.protocol import Environment, InfrastructureError, Message
from refiner_core.environments.turns import CLOSE
from refiner_core.generation.completions import completion_text, turn_generator


@dataclass(eq=False)
class _Job:
    """Work in a thread with, once it is over, its result (or exception, or lateness) and its
    seconds."""

    key: int
    work: Callable[[], Any]
    limit_s: float
    abandoned: Callable[[], None]
    began: float = 0.0
    value: Any = None
    error: BaseException | None = None
    late: bool = False
    seconds: float = 0.0


class Workers:
    """At most ``count`` jobs at a time, not counting those that hang, each in a daemon thread of
    its own."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._urgent: deque[_Job] = deque()
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._ended: list[_Job] = []

    def submit(
        self,
        key: int,
        work: Callable[[], Any],
        limit_s: float,
        *,
        urgent: bool = True,
        abandoned: Callable[[], None] = lambda: None,
    ) -> None:
        """Run ``work`` in a thread, urgent work first.

        Parameters
        ----------
        key
            Returned with its end; one job per key at a time.
        limit_s
            Seconds after which it is late.
        abandoned
            Called in the thread of late work, if it ever ends.
        """
        with self._changed:
            job = _Job(key, work, limit_s, abandoned)
            (self._urgent if urgent else self._waiting).append(job)
            self._start()

    def ended(self, timeout_s: float) -> list[_Job]:
        """All jobs that ended since the last call; waits up to ``timeout_s`` for a first one."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now = time.monotonic()
                for job in [j for j in self._running if now - j.began >= j.limit_s]:
                    self._over(job)  # no longer awaited
                    job.late = True
                self._start()
                if self._ended or now >= until:
                    ended, self._ended = self._ended, []
                    return ended
                limits = [job.began + job.limit_s for job in self._running]
                self._changed.wait(max(0.0, min([until, *limits]) - now))

    def abandon(self) -> frozenset[int]:
        """Drop waiting jobs, and declare running ones late: the keys of running jobs."""
        with self._changed:
            running, self._running = self._running, []
            self._urgent.clear()
            self._waiting.clear()
            self._ended.clear()
            return frozenset(job.key for job in running)

    def _start(self) -> None:
        while (queue := self._urgent or self._waiting) and len(self._running) < self._count:
            job = queue.popleft()
            job.began = time.monotonic()
            self._running.append(job)
            threading.Thread(
                target=self._work, args=(job,), name="refiner-episodes", daemon=True
            ).start()
            self._changed.notify_all()  # the next deadline has changed

    def _over(self, job: _Job) -> None:
        self._running.remove(job)
        job.seconds = time.monotonic() - job.began
        self._ended.append(job)

    def _work(self, job: _Job) -> None:
        value, error = None, None
        try:
            value = job.work()
        except BaseException as raised:  # a tool may raise SystemExit; passed to the waiting thread
            error = raised
        with self._changed:
            if waited_for := job in self._running:
                job.value, job.error = value, error
                self._over(job)
                self._start()
                self._changed.notify_all()
        if not waited_for:
            job.abandoned()


#: Interval at which a wait checks for a stop, seconds.
_LOOK_S = 0.5
#: Time for episodes to release resources after an abort.
_CLOSE_S = 10.0
_OURS = "set grpo.generation_backend to the other one, and report this: it is a bug in refiner"


class _EpisodeScheduler:
    """A :class:`~refiner_core.contract.types.TurnScheduler` over episodes; see
    :func:`refiner_core.environments.episodes.run_episodes` for parameters and errors."""

    def __init__(
        self,
        environment: Environment,
        tokenizer: Any,
        requests: Sequence[EpisodeRequest],
        settings: EpisodeSettings,
        on_episode: Callable[[int, Completion], None],
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self._environment, self._tokenizer, self._settings = environment, tokenizer, settings
        self._requests, self._on_episode = requests, on_episode
        self._should_stop = should_stop
        self._workers = Workers(settings.section.workers)
        self._plays: dict[int, EpisodeRunner] = {}
        #: Being reset; reset but not started; ready for a turn; working; started, end not yet
        #: reported.
        self._resetting: set[int] = set()
        self._fresh: set[int] = set()
        self._ready: set[int] = set()
        self._working: dict[int, Callable[[Any, float], None]] = {}  # with its result handlers
        self._begun: set[int] = set()
        self._told_ended: list[int] = []
        self._reports: list[tuple[int, Completion]] = []
        self._next, self._reported = 0, 0
        self._reset_ahead(settings.section.workers)

    # ------------------------------------------------ called by a generator

    def take(self, room: int, *, wait: bool) -> Turns:
        """As :meth:`refiner_core.contract.types.TurnScheduler.take`."""
        self._reset_ahead(room + self._settings.section.workers)
        self._collect(0.0)
        if self._settings.ordered:
            self._settle(room)
        while wait and not self._ready and not (room > 0 and self._fresh) and self._more():
            if self._told_ended and room <= 0:
                break  # the generator has capacity once it knows of them
            self._collect(_LOOK_S)
            self._reset_ahead(room + self._settings.section.workers)
            if self._settings.ordered:
                self._settle(room)
        begin = [*sorted(self._ready), *sorted(self._fresh)[: max(0, room)]]
        self._begun.update(begin)
        self._ready.clear()
        self._fresh.difference_update(begin)
        ended, self._told_ended = tuple(sorted(self._told_ended)), []
        return Turns(tuple(self._plays[n].turn() for n in begin), ended, self._more())

    def finished(self, request: TurnRequest, completion: Completion) -> None:
        """As :meth:`refiner_core.contract.types.TurnScheduler.finished`."""
        play = self._plays[request.conversation]
        call = play.sampled(completion_text(self._tokenizer, completion), completion)
        if call == "again":
            self._ready.add(play.number)
        elif call is None:
            self._end(play)
        else:
            last = play.last
            self._submit(play, lambda: play.step(call, last=last), partial(self._after_step, play))

    # ------------------------------------------------ called by the runner

    def drain(self) -> None:
        """Wait for the remaining outcomes, after the generator returned.

        Raises
        ------
        StageFailed
            The generator left turns unsampled.
        """
        while self._reported < len(self._requests):
            if self._more():
                left = len(self._requests) - self._reported
                raise StageFailed(
                    f"The generator has returned with {left} episodes unfinished",
                    expected="turns() to work until the desk has no more",
                    fix=_OURS,
                )
            if self._settings.ordered:
                self._settle(0)
            else:
                self._collect(_LOOK_S)

    def close(self) -> None:
        """Close all unfinished episodes. A hanging one closes itself if it ever
        returns."""
        hanging = self._workers.abandon()
        left = {number for number in self._plays if number not in hanging}
        for number in left:
            self._workers.submit(number, self._plays[number].close, _CLOSE_S)
        until = time.monotonic() + _CLOSE_S
        while left and (now := time.monotonic()) < until:
            left -= {ended.key for ended in self._workers.ended(until - now)}
        self._workers.abandon()

    # ------------------------------------------------ internal

    def _more(self) -> bool:
        """True if further turns are possible: an episode is not known to be over."""
        if self._next < len(self._requests) or self._resetting:
            return True
        return any(play.ended is None for play in self._plays.values())

    def _reset_ahead(self, count: int) -> None:
        """Ensure that ``count`` episodes that have not started are reset, or being reset."""
        while len(self._resetting) + len(self._fresh) < count and self._next < len(self._requests):
            number, self._next = self._next, self._next + 1
            request = self._requests[number]
            play = EpisodeRunner(
                number, request, self._environment, self._tokenizer, self._settings
            )
            self._plays[number] = play
            self._resetting.add(number)
            self._submit(play, play.begin, partial(self._after_begin, play), urgent=False)

    def _submit(
        self,
        play: EpisodeRunner,
        work: Callable[[], Any],
        then: Callable[[Any, float], None],
        *,
        urgent: bool = True,
    ) -> None:
        def closing() -> Any:
            try:
                return work()
            except BaseException:
                play.close()
                raise

        self._working[play.number] = then
        self._workers.submit(
            play.number, closing, play.limit_s(), urgent=urgent, abandoned=play.close
        )

    def _end(self, play: EpisodeRunner) -> None:
        """End the turns of an episode; its outcome is still to come."""
        self._tell_ended(play)
        self._submit(play, play.end, lambda outcome, _: self._finish(play, play.finished(outcome)))

    def _tell_ended(self, play: EpisodeRunner) -> None:
        if play.number in self._begun:
            self._begun.discard(play.number)
            self._told_ended.append(play.number)

    def _settle(self, room: int) -> None:
        """Wait for all work except resets beyond the free capacity."""
        while True:
            first = sorted(self._fresh | self._resetting)[: max(0, room)]
            if not (self._working.keys() - self._resetting) and not self._resetting.intersection(
                first
            ):
                self._report()
                return
            self._collect(_LOOK_S)
            self._reset_ahead(room + self._settings.section.workers)

    def _collect(self, timeout_s: float) -> None:
        """Process finished work; waits up to ``timeout_s`` for a first job."""
        if self._should_stop is not None and self._should_stop():
            raise Interrupted(
                "Stopped on request, between two turns of episodes",
                fix="run the same command again; it resumes from the last checkpoint",
            )
        for ended in sorted(self._workers.ended(timeout_s), key=lambda e: e.key):
            play, then = self._plays[ended.key], self._working.pop(ended.key)
            self._resetting.discard(play.number)
            error = play.late(ended.seconds) if ended.late else ended.error
            play.seconds += ended.seconds
            if isinstance(error, InfrastructureError):
                self._finish(play, play.failed(error))
            elif isinstance(error, RefinerError):
                raise error
            elif error is not None:
                raise StageFailed(
                    f"A worker failed ({play.where()}): {error!r}",
                    expected="an environment that answers each call",
                    fix="see the traceback in `refiner logs STAGE`, and correct the environment",
                ) from error
            else:
                then(ended.value, ended.seconds)
        if not self._settings.ordered:
            self._report()

    def _after_begin(self, play: EpisodeRunner, begun: tuple[Message, ...], seconds: float) -> None:
        self._go_on(play, self._fresh, fits=play.begun(begun))

    def _after_step(self, play: EpisodeRunner, stepped: Stepped, seconds: float) -> None:
        fits = play.stepped(stepped, seconds)
        step, outcome = stepped
        if outcome is None:
            self._go_on(play, self._ready, fits=fits)
            return
        play.ended = "done" if step.done else "turn_limit"
        self._finish(play, play.finished(outcome))

    def _go_on(self, play: EpisodeRunner, among: set[int], *, fits: bool) -> None:
        if fits:
            among.add(play.number)
        else:
            play.ended = "context_limit"
            self._end(play)

    def _finish(self, play: EpisodeRunner, completion: Completion) -> None:
        self._tell_ended(play)
        del self._plays[play.number]
        self._reports.append((play.number, completion))

    def _report(self) -> None:
        """Report ended episodes to the runner; in the order of requests, if that is configured."""
        reports, self._reports = sorted(self._reports, key=lambda report: report[0]), []
        for number, completion in reports:
            self._reported += 1
            self._on_episode(number, completion)


def settings_of(
    config: RecipeConfig, environment: Environment, sampling: SamplingParams
) -> EpisodeSettings:
    """The settings of a recipe, with the caller's sampling."""
    section, grpo = config.environment, config.grpo
    auto = section.schedule == "auto"
    ordered = environment.deterministic if auto else section.schedule == "ordered"
    sampling = replace(sampling, max_new_tokens=grpo.response_length, stop_strings=(CLOSE,))
    return EpisodeSettings(section, grpo.max_token_length, sampling, ordered)


def run_episodes(
    generator: Generator | TurnGenerator,
    environment: Environment,
    tokenizer: Any,
    requests: Sequence[EpisodeRequest],
    settings: EpisodeSettings,
    on_episode: Callable[[int, Completion], None],
    *,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Run all episodes, as many at a time as the generator accepts.

    Parameters
    ----------
    generator
        Driven in lockstep if it does not sample turns of conversations.
    on_episode
        Called with the index of the request and its completion, in this thread, as each episode
        ends; an exception from it ends the call. An episode whose first messages do not fit into
        the context has no tokens.
    should_stop
        Checked between turns.

    Raises
    ------
    ConfigurationError
        The prompt alone is as long as the context, or the tokenizer's template cannot be used.
    StageFailed
        The environment raised an unexpected exception; names environment, task and turn.
    Interrupted
        ``should_stop`` returned True.
    RefinerError
        Other errors of the environment (a judge's outage), and those of the generator.
    """
    if not requests:
        return
    _check(requests, settings)
    desk = _EpisodeScheduler(environment, tokenizer, requests, settings, on_episode, should_stop)
    try:
        turn_generator(generator).turns(desk)
        desk.drain()
    finally:
        desk.close()


def _check(requests: Sequence[EpisodeRequest], settings: EpisodeSettings) -> None:
    longest = max(requests, key=lambda request: len(request.prompt_ids))
    length = len(longest.prompt_ids)
    if length >= settings.context_tokens:
        raise ConfigurationError(
            f"Policy and tools of {longest.task.domain} take {length} tokens, and an episode may "
            f"have {settings.context_tokens} (grpo.max_token_length)",
            expected="space for messages and turns after the policy",
            fix="raise grpo.max_token_length",
        )
