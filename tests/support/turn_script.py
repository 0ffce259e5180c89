"""A desk of scripted conversations, for tests of samplers of turns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from refiner_core.contract.types import Completion, SamplingParams, TurnRequest, Turns
from tests.support.tiny_training import VOCABULARY


class Script:
    """A desk of conversations that begin alike in groups and get a message after each turn.

    ``slow(conversation, turn)`` is how many calls of ``take`` its tools last; with ``wait`` they
    are over at once. Some turns are repaired: what was sampled is dropped from the context.
    """

    def __init__(
        self,
        conversations: int = 7,
        turns: int = 3,
        *,
        params: Callable[[int, int], SamplingParams] = lambda *_: SamplingParams(max_new_tokens=9),
        slow: Callable[[int, int], int] = lambda *_: 0,
        repaired: Callable[[int, int], bool] = lambda *_: False,
        prompt: int = 30,
        told: int = 12,
    ) -> None:
        self.turns, self.params, self.slow, self.repaired = turns, params, slow, repaired
        self._told = told
        rng = np.random.default_rng(1)
        shared = [_ids(rng, prompt) for _ in range(2)]
        task = [_ids(rng, 20) for _ in range(3)]
        self.fresh = [
            (c, (*shared[c % 2], *task[c % 3], *_ids(rng, c % 4))) for c in range(conversations)
        ]
        self._tools: list[tuple[int, int, int, tuple[int, ...]]] = []
        self._ended: list[int] = []
        self.known: set[int] = set()
        #: Most conversations that were under way at a time.
        self.most = 0
        self.done: dict[tuple[int, int], tuple[TurnRequest, Completion]] = {}
        self.finish_order: list[tuple[int, int]] = []
        self.asked: list[tuple[int, bool, int]] = []

    def take(self, room: int, *, wait: bool) -> Turns:
        ended, self._ended = tuple(self._ended), []
        self.known -= set(ended)
        begin = []
        for conversation, context in self.fresh[:room]:
            begin.append(self._request(conversation, 0, context))
            self.known.add(conversation)
        del self.fresh[:room]
        later = []
        for left, conversation, turn, context in self._tools:
            if left <= 0 or (wait and not begin):
                begin.append(self._request(conversation, turn, context))
            else:
                later.append((left - 1, conversation, turn, context))
        self._tools = later
        self.most = max(self.most, len(self.known))
        self.asked.append((room, wait, len(begin)))
        return Turns(tuple(begin), ended, bool(self.fresh or self.known))

    def _request(self, conversation: int, turn: int, context: tuple[int, ...]) -> TurnRequest:
        seed = 1000 * conversation + turn
        return TurnRequest(conversation, context, seed, self.params(conversation, turn))

    def finished(self, request: TurnRequest, completion: Completion) -> None:
        conversation, turn = request.conversation, request.seed % 1000
        self.done[conversation, turn] = request, completion
        self.finish_order.append((conversation, turn))
        if turn + 1 == self.turns:
            self._ended.append(conversation)
            return
        own = () if self.repaired(conversation, turn) else completion.token_ids
        context = (*request.context_ids, *own, *self.told(conversation, turn))
        self._tools.append((self.slow(conversation, turn), conversation, turn + 1, context))

    def told(self, conversation: int, turn: int) -> tuple[int, ...]:
        """The message to a conversation after a turn."""
        rng = np.random.default_rng(1000 * conversation + turn)
        return _ids(rng, 1 + (conversation + turn) % self._told)


def _ids(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(int(x) for x in rng.integers(3, VOCABULARY, count))
