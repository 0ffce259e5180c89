"""`python -m tests.bench episodes`: many episodes with tools at a time.

One JSON line each:

* concurrent episodes against the same tokens generated single-turn at the same batch size: the
  rival is `generate` of the same generator, with each episode's prompt and all that tools say in it
  as its prompt, and as many own tokens. CPU time, one thread; goal: ratio >= 0.85. Once with as
  many episodes as the batch has places, once with twice as many, and once with prefixes that
  are not shared;
* tools that take 50 to 200 ms: tokens per second of wall time, as a share of those with tools that
  take none, and the share of time in which nothing was decoded; the rival decodes round by round;

The model has the shape of `builtin:tiny` with random weights; the lengths of
turns and of what tools say are drawn once, and forced (nothing ends a turn but its length). A tool
takes time and no CPU, as a simulated user at another machine does.
"""

import heapq
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    SamplingParams,
    TurnGenerator,
    TurnRequest,
    Turns,
)
from refiner_core.generation.completions import LockstepTurns
from refiner_core.generation.transformers_backend import TransformersGenerator
from tests.bench.__main__ import ROUNDS, compare, endless_generator, machine

BATCH, TURNS = 64, 4
PROMPT, FIRST, OWN, TOLD = 256, 24, 24, 32  # tokens: shared prompt, first message, means per turn
SLOWEST_S = (0.05, 0.2)
GOAL = 0.85


@dataclass(frozen=True)
class Plan:
    """One episode: its prompt, and per turn own tokens and what is told then (after the last turn
    nothing is)."""

    prompt: tuple[int, ...]
    own: tuple[int, ...]
    told: tuple[tuple[int, ...], ...]
    tools_s: tuple[float, ...]

    @property
    def flat(self) -> tuple[int, ...]:
        """All tokens that are not its own."""
        return (*self.prompt, *(token for told in self.told for token in told))


def plans(count: int, vocabulary: int, *, shared: bool, slow: bool) -> list[Plan]:
    """Episodes of 2 domains; own and told tokens of each sum up to the same."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(int(x) for x in rng.integers(3, vocabulary, length))

    domains = [ids(PROMPT) for _ in range(2 if shared else count)]
    made = []
    for number in range(count):
        tools = rng.uniform(*SLOWEST_S, TURNS - 1) if slow else np.zeros(TURNS - 1)
        made.append(
            Plan(
                prompt=domains[number % len(domains)] + ids(FIRST),
                own=_around(rng, OWN, TURNS),
                told=tuple(ids(length) for length in _around(rng, TOLD, TURNS - 1)),
                tools_s=tuple(tools.tolist()),
            )
        )
    return made


def _around(rng: np.random.Generator, mean: int, count: int) -> tuple[int, ...]:
    """Lengths from a half to one and a half of the mean, whose sum is ``mean * count``."""
    lengths = rng.integers(mean // 2, mean + mean // 2 + 1, count)
    while (over := int(lengths.sum()) - mean * count) != 0:
        lengths[rng.integers(count)] -= np.sign(over)
        lengths = lengths.clip(mean // 2, mean + mean // 2)
    return tuple(int(x) for x in lengths)


class PlannedDesk:
    """A desk of planned episodes, eager: a turn may begin once its tool's time is over."""

    def __init__(self, episodes: Sequence[Plan]) -> None:
        self._episodes, self._next, self._open = episodes, 0, len(episodes)
        self._turn = [0] * len(episodes)
        self._ready: list[tuple[float, int, tuple[int, ...]]] = []
        self._ended: list[int] = []
        self.own_tokens, self.idle_s = 0, 0.0

    def take(self, room: int, *, wait: bool) -> Turns:
        """What is ready; with ``wait`` it sleeps until something is, and counts the time."""
        ended, self._ended = tuple(self._ended), []
        fresh = range(self._next, min(self._next + room, len(self._episodes)))
        self._next = fresh.stop
        begin = [self._request(number, self._episodes[number].prompt) for number in fresh]
        now = time.monotonic()
        if wait and not begin and self._ready and self._ready[0][0] > now:
            time.sleep(self._ready[0][0] - now)
            self.idle_s += time.monotonic() - now
            now = time.monotonic()
        while self._ready and self._ready[0][0] <= now:
            _, number, context = heapq.heappop(self._ready)
            begin.append(self._request(number, context))
        return Turns(tuple(begin), ended, self._open > 0)

    def _request(self, number: int, context: tuple[int, ...]) -> TurnRequest:
        turn = self._turn[number]
        params = SamplingParams(max_new_tokens=self._episodes[number].own[turn])
        return TurnRequest(number, context, TURNS * number + turn, params)

    def finished(self, request: TurnRequest, completion: Completion) -> None:
        """The tool begins, or the episode is over."""
        number = request.conversation
        plan, turn = self._episodes[number], self._turn[number]
        assert len(completion.token_ids) == plan.own[turn]
        self.own_tokens += len(completion.token_ids)
        self._turn[number] = turn + 1
        if turn + 1 == len(plan.own):
            self._open -= 1
            self._ended.append(number)
            return
        context = (*request.context_ids, *completion.token_ids, *plan.told[turn])
        heapq.heappush(self._ready, (time.monotonic() + plan.tools_s[turn], number, context))


def main(arguments: list[str]) -> int:
    """Measure; 0 even where a goal is missed: the lines say so."""
    torch.set_num_threads(1)
    generator = endless_generator(BATCH)
    vocabulary = len(generator.tokenizer)
    cases: tuple[tuple[str, int, bool], ...] = (
        (f"{BATCH} episodes", BATCH, True),
        (f"{2 * BATCH} episodes, {BATCH} at a time", 2 * BATCH, True),
        (f"{BATCH} episodes with prompts of their own", BATCH, False),
    )
    for name, count, shared in cases:
        episodes = plans(count, vocabulary, shared=shared, slow=False)
        line = against_single_turns(f"{name} against single turns", generator, episodes)
        print(json.dumps(line), flush=True)
    for line in slow_tools(generator, plans(BATCH, vocabulary, shared=True, slow=True)):
        print(json.dumps(line), flush=True)
    return 0


def against_single_turns(
    name: str, generator: TransformersGenerator, episodes: Sequence[Plan]
) -> dict[str, Any]:
    """The same tokens in one turn each."""
    own = OWN * TURNS
    requests = [GenerationRequest(plan.flat, seed) for seed, plan in enumerate(episodes)]
    params = SamplingParams(max_new_tokens=own)

    def ours() -> int:
        desk = PlannedDesk(episodes)
        generator.turns(desk)
        return desk.own_tokens

    def rival() -> int:
        return sum(len(c.token_ids) for c in generator.generate(requests, params))

    assert ours() == rival() == own * len(episodes)
    assert {len(plan.flat) for plan in episodes} == {PROMPT + FIRST + TOLD * (TURNS - 1)}
    line = compare(name, ours, rival, own * len(episodes), "own tokens per CPU-second")
    return line | {"goal": f"ratio >= {GOAL}", "met": line["ratio"] >= GOAL}


def slow_tools(generator: TransformersGenerator, episodes: Sequence[Plan]) -> list[dict[str, Any]]:
    """Wall times, in turn: tools that take time and none, ours and round by round."""
    instant = plans(len(episodes), len(generator.tokenizer), shared=True, slow=False)
    sides: dict[str, TurnGenerator] = {"ours": generator, "rival": LockstepTurns(generator)}
    rates: dict[str, list[float]] = {}
    idle: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, chosen in sides.items():
            for kind, work in (("instant", instant), ("slow", episodes)):
                desk = PlannedDesk(work)
                begun = time.monotonic()
                chosen.turns(desk)
                wall_s = time.monotonic() - begun
                rates.setdefault(f"{side} {kind}", []).append(desk.own_tokens / wall_s)
                if kind == "slow":
                    idle[side].append(desk.idle_s / wall_s)
    rate = {name: statistics.median(found) for name, found in rates.items()}
    common = {"rounds": ROUNDS, "machine": machine()}
    kept = {side: rate[f"{side} slow"] / rate[f"{side} instant"] for side in sides}
    still = {side: statistics.median(shares) for side, shares in idle.items()}
    slow = {side: rate[f"{side} slow"] for side in sides}
    tools = f"tools of {SLOWEST_S[0] * 1000:.0f} to {SLOWEST_S[1] * 1000:.0f} ms"
    rounds = "own tokens per second; the rival decodes round by round"
    lines = (
        (f"{BATCH} episodes, {tools}", slow, rounds),
        (f"{tools}, throughput of instant ones that is kept", kept, "share"),
        (
            f"{tools}, time in which nothing was decoded",
            still,
            "share of wall time, less is better",
        ),
    )
    return [
        {
            **{"name": name, "ours": round(found["ours"], 3), "rival": round(found["rival"], 3)},
            **{"ratio": round(found["ours"] / found["rival"], 2), "unit": unit, **common},
        }
        for name, found, unit in lines
    ]
