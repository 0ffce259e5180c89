"""The desk of turns: episodes on one side, a generator on the other, tools in threads between.

In: requests, an environment, a tokenizer. Out: turns to sample, and finished episodes as they end.

Everything here happens in the generator's thread but for the environment's own work, which
:class:`~refiner_core.environments.workers.Workers` does. *Eager*, the desk gives what is ready now.
*Ordered*, every call first waits for the work of all turns that were finished before it, and of as
many new episodes as there is room: what it gives depends on the sequence of calls alone, however
long tools take, so that results are the same to the bit. Tools work while others decode in either
case; a generator that asks every few steps gives them that long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from refiner_core.contract.errors import Interrupted, RefinerError, StageFailed
from refiner_core.contract.types import Completion, TurnRequest, Turns
from refiner_core.environments.play import (
    Begun,
    EpisodeRequest,
    EpisodeSettings,
    Play,
    Stepped,
)
from refiner_core.environments.protocol import Environment, InfrastructureError, Outcome
from refiner_core.environments.workers import Ended, Workers
from refiner_core.generation.text import completion_text

#: How often a wait looks whether it should stop, seconds.
_LOOK_S = 0.5
#: How long episodes may take to give back what they hold, when all is broken off.
_CLOSE_S = 10.0
_OURS = "set grpo.generation_backend to the other one, and report this: it is a bug in refiner"


class EpisodeDesk:
    """A :class:`~refiner_core.contract.types.TurnDesk` over episodes; see
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
        self._workers = Workers(settings.workers)
        self._plays: dict[int, Play] = {}
        #: Being reset; reset and not begun; ready for a turn; at work; begun and not told ended.
        self._resetting: set[int] = set()
        self._fresh: set[int] = set()
        self._ready: set[int] = set()
        self._working: set[int] = set()
        self._begun: set[int] = set()
        self._told_ended: list[int] = []
        self._reports: list[tuple[int, Completion]] = []
        self._next, self._reported = 0, 0
        self._reset_ahead(settings.workers)

    # ------------------------------------------------ what a generator calls

    def take(self, room: int, *, wait: bool) -> Turns:
        """As :meth:`refiner_core.contract.types.TurnDesk.take`."""
        self._reset_ahead(room + self._settings.workers)
        self._collect(0.0)
        if self._settings.ordered:
            self._settle(room)
        while wait and not self._ready and not (room > 0 and self._fresh) and self._more():
            if self._told_ended and room <= 0:
                break  # once it knows of them there is room
            self._require_waiting(room)
            self._collect(_LOOK_S)
            self._reset_ahead(room + self._settings.workers)
            if self._settings.ordered:
                self._settle(room)
        begin = [*sorted(self._ready), *sorted(self._fresh)[: max(0, room)]]
        self._begun.update(begin)
        self._ready.clear()
        self._fresh.difference_update(begin)
        ended, self._told_ended = tuple(sorted(self._told_ended)), []
        return Turns(tuple(self._plays[n].turn() for n in begin), ended, self._more())

    def finished(self, request: TurnRequest, completion: Completion) -> None:
        """As :meth:`refiner_core.contract.types.TurnDesk.finished`."""
        play = self._plays[request.conversation]
        call = play.sampled(completion_text(self._tokenizer, completion), completion)
        if call == "again":
            self._ready.add(play.number)
        elif call is None:
            self._end(play)
        else:
            last = play.last
            self._submit(play, lambda: play.step(call, last=last))

    # ------------------------------------------------ what the runner calls

    def drain(self) -> None:
        """Wait for the outcomes that are still to come, once the generator has returned.

        Raises
        ------
        StageFailed
            The generator has left turns unsampled.
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
        """Close all episodes that are not over, and end the threads. What hangs closes itself,
        should it ever come back."""
        hanging = self._workers.abandon()
        left = {number for number in self._plays if number not in hanging}
        for number in left:
            self._workers.submit(number, self._plays[number].close, _CLOSE_S)
        until = time.monotonic() + _CLOSE_S
        while left and (now := time.monotonic()) < until:
            left -= {ended.key for ended in self._workers.ended(until - now)}
        self._workers.close()

    # ------------------------------------------------ inside

    def _more(self) -> bool:
        """Whether there may be further turns: an episode that is not over as far as it is known."""
        if self._next < len(self._requests) or self._resetting:
            return True
        return any(play.ended is None for play in self._plays.values())

    def _reset_ahead(self, count: int) -> None:
        """See that ``count`` episodes that have not begun are reset, or being reset."""
        while len(self._resetting) + len(self._fresh) < count and self._next < len(self._requests):
            number, self._next = self._next, self._next + 1
            request = self._requests[number]
            play = Play(number, request, self._environment, self._tokenizer, self._settings)
            self._plays[number] = play
            self._resetting.add(number)
            self._submit(play, play.begin, urgent=False)

    def _submit(self, play: Play, work: Callable[[], Any], *, urgent: bool = True) -> None:
        def closing() -> Any:
            try:
                return work()
            except BaseException:
                play.close()
                raise

        self._working.add(play.number)
        self._workers.submit(
            play.number, closing, play.limit_s(), urgent=urgent, abandoned=play.close
        )

    def _end(self, play: Play) -> None:
        """No further turn; what it was worth is still to be said."""
        self._tell_ended(play)
        self._submit(play, play.end)

    def _tell_ended(self, play: Play) -> None:
        if play.number in self._begun:
            self._begun.discard(play.number)
            self._told_ended.append(play.number)

    def _settle(self, room: int) -> None:
        """Wait for all work but resets beyond what there is room for."""
        while True:
            first = sorted(self._fresh | self._resetting)[: max(0, room)]
            if not (self._working - self._resetting) and not self._resetting.intersection(first):
                self._report()
                return
            self._collect(_LOOK_S)
            self._reset_ahead(room + self._settings.workers)

    def _require_waiting(self, room: int) -> None:
        if not self._working:
            raise StageFailed(
                f"The generator waits for turns with room for {max(0, room)} new conversations, "
                "and no conversation of its own goes on",
                expected="room for at least one",
                fix=_OURS,
            )

    def _collect(self, timeout_s: float) -> None:
        """Take in what has ended; waits up to ``timeout_s`` for a first one."""
        if self._should_stop is not None and self._should_stop():
            raise Interrupted(
                "Stopped on request, between two turns of episodes",
                fix="run the same command again; it goes on from the last checkpoint",
            )
        for ended in sorted(self._workers.ended(timeout_s), key=lambda e: e.key):
            self._working.discard(ended.key)
            self._take_in(self._plays[ended.key], ended)
        if not self._settings.ordered:
            self._report()

    def _take_in(self, play: Play, ended: Ended) -> None:
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
        elif isinstance(ended.value, Begun):
            self._go_on(play, fits=play.begun(ended.value), new=True)
        elif isinstance(ended.value, Stepped):
            self._after_step(play, ended.value, ended.seconds)
        elif isinstance(ended.value, Outcome):
            self._finish(play, play.finished(ended.value))

    def _after_step(self, play: Play, stepped: Stepped, seconds: float) -> None:
        fits = play.stepped(stepped, seconds)
        if stepped.outcome is None:
            self._go_on(play, fits=fits, new=False)
            return
        play.ended = "done" if stepped.step.done else "turn_limit"
        self._finish(play, play.finished(stepped.outcome))

    def _go_on(self, play: Play, *, fits: bool, new: bool) -> None:
        if not fits:
            play.ended = "context_limit"
            self._end(play)
        elif new:
            self._fresh.add(play.number)
        else:
            self._ready.add(play.number)

    def _finish(self, play: Play, completion: Completion) -> None:
        self._tell_ended(play)
        del self._plays[play.number]
        self._reports.append((play.number, completion))

    def _report(self) -> None:
        """Tell the runner what has ended; in the order of requests, for those that want it so."""
        reports, self._reports = sorted(self._reports, key=lambda report: report[0]), []
        for number, completion in reports:
            self._reported += 1
            self._on_episode(number, completion)
