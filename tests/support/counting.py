"""A small real environment, and a generator whose turns are written beforehand.

The game: a counter starts at 0; the user names a number, and the agent reaches it by ``add`` and
ends by ``finish``. Tasks say how slow, how faulty, or how talkative the tools are.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refiner_core.contract.types import Completion, TurnRequest, TurnScheduler
from refiner_core.environments.protocol import (
    Check,
    InfrastructureError,
    Message,
    Outcome,
    Step,
    Task,
    ToolCall,
    ToolSpec,
)

RULES = "Count to the number that the user names."
NUMBER = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
TOOLS = (
    ToolSpec("add", "Add to the counter", NUMBER),
    ToolSpec("finish", "End", {"type": "object", "properties": {}}),
)


def task_of(number: int, *, goal: int = 2, **data: Any) -> Task:
    return Task(f"t{number}", "counting", "train", f"count to {goal}", {"goal": goal, **data})


class CountingEpisode:
    """What a task's data may say: ``sleep`` (seconds per step), ``hang`` (a
    step that waits for the environment's ``release``), ``down`` (the step at which the user is
    gone; 0 is the reset), ``bug`` (the same for an exception; with ``after_one`` not before another
    episode has ended), ``words`` (length of a result)."""

    def __init__(self, environment: Counting, task: Task) -> None:
        self.environment, self.data = environment, task.data
        self.count = self.steps = self.errors = 0
        self.done = self.closed = False

    def _trouble(self) -> None:
        with self.environment.lock:
            self.environment.at_work += 1
            self.environment.most = max(self.environment.most, self.environment.at_work)
        try:
            time.sleep(self.data.get("sleep", 0.0))
            if self.data.get("hang") == self.steps:
                self.environment.release.wait(60)
            if self.data.get("down") == self.steps:
                raise InfrastructureError("The user is gone", kind="user_down")
            if self.data.get("bug") == self.steps:
                self._wait_for_another()
                raise ZeroDivisionError("a bug")
        finally:
            with self.environment.lock:
                self.environment.at_work -= 1

    def _wait_for_another(self) -> None:
        """What another episode that has ended leaves is collected in between."""
        until = time.monotonic() + 20
        while self.data.get("after_one") and time.monotonic() < until:
            if self.environment.closed:
                time.sleep(0.3)
                return
            time.sleep(0.01)

    def reset(self, seed: int) -> tuple[Message, ...]:
        self.seed = seed
        self._trouble()
        extra = " please" * self.data.get("long_task", 0)
        return (Message("user", f"Count to {self.data['goal']} ({seed % 7}).{extra}"),)

    def step(self, call: ToolCall) -> Step:
        self.steps += 1
        self._trouble()
        if call.name == "finish":
            self.done = True
            return Step((), done=True)
        if call.name != "add":
            self.errors += 1
            return Step((Message("tool", "no such tool"),), tool_error="wrong_tool")
        by = call.arguments.get("by")
        if not isinstance(by, int):
            self.errors += 1
            return Step((Message("tool", "by is a number"),), tool_error="wrong_argument")
        self.count += by
        return Step((Message("tool", f"{self.count}" + " ok" * self.data.get("words", 0)),))

    def checks(self) -> tuple[Check, ...]:
        goal = self.data["goal"]
        return tuple(Check("action", f"at {n}", self.count >= n) for n in range(1, goal + 1))

    def outcome(self) -> Outcome:
        solved = self.count == self.data["goal"] and (self.done or self.data.get("as_it_stands"))
        reward = self.data.get("reward", 1.0 if solved else 0.0)
        failure = None if solved else "incomplete"
        return Outcome(reward, self.checks(), {"count": float(self.count)}, failure=failure)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with self.environment.lock:
                self.environment.closed += 1


class Counting:
    """The environment. ``most`` is the largest number of episodes at work at a time."""

    name, version, deterministic = "counting", "1", True
    speak, finish = "add", "finish"

    def __init__(self) -> None:
        self.lock, self.release = threading.Lock(), threading.Event()
        self.made = self.closed = self.at_work = self.most = 0

    def domains(self) -> tuple[str, ...]:
        return ("counting",)

    def tasks(self, split: str) -> tuple[Task, ...]:
        return tuple(task_of(n) for n in range(4))

    def policy(self, domain: str) -> str:
        return RULES

    def tools(self, domain: str) -> tuple[ToolSpec, ...]:
        return TOOLS

    def episode(self, task: Task) -> CountingEpisode:
        with self.lock:
            self.made += 1
        return CountingEpisode(self, task)

    def describe(self) -> Mapping[str, Any]:
        return {"name": self.name, "version": self.version}


def call(name: str = "add", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass
class Scripted:
    """A generator whose turns are texts, or tokens: ``script(conversation, nth attempt)``.

    A turn takes ``steps(conversation, nth)`` calls of the desk, as decoding would; at most ``room``
    conversations are under way. ``log`` is all that the desk gave.
    """

    tokenizer: Any
    script: Callable[[int, int], str | Sequence[int]]
    room: int = 4
    steps: Callable[[int, int], int] = lambda conversation, attempt: 1
    log: list[tuple[Any, ...]] = field(default_factory=list)

    def turns(self, desk: TurnScheduler) -> None:
        attempts: dict[int, int] = {}
        running: dict[int, tuple[int, TurnRequest]] = {}
        known: set[int] = set()
        while True:
            turns = desk.take(self.room - len(known), wait=not running)
            begun = [(r.conversation, r.context_ids, r.seed, r.params) for r in turns.begin]
            self.log.append((begun, turns.ended, turns.more))
            known -= set(turns.ended)
            known |= {request.conversation for request in turns.begin}
            assert len(known) <= self.room
            for request in turns.begin:
                nth = attempts[request.conversation] = attempts.get(request.conversation, -1) + 1
                running[request.conversation] = (self.steps(request.conversation, nth), request)
            if not turns.more and not running:
                return
            for number, (left, request) in list(running.items()):
                running[number] = (left - 1, request)
                if left <= 1:
                    del running[number]
                    turn = self.script(number, attempts[number])
                    desk.finished(request, self.completion(turn, request))

    def completion(self, turn: str | Sequence[int], request: TurnRequest) -> Completion:
        """The turn in tokens, cut at the longest; log-probabilities tell the place."""
        ids = turn
        if isinstance(turn, str):
            ids = self.tokenizer(turn, add_special_tokens=False)["input_ids"]
        most = request.params.max_new_tokens
        logprobs = tuple(-float(place + 1) / 8 for place in range(min(len(ids), most)))
        return Completion(tuple(ids[:most]), logprobs, "length" if len(ids) > most else "stop")
