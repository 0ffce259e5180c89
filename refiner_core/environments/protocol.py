"""What an environment is: tasks, tools, messages, steps, outcomes.

In: nothing. Out: types. Torch-free, and without a tokenizer: environments speak text.

An *environment* offers tasks in domains. An *episode* is one try at a task: :meth:`Episode.reset`
gives the first messages, each :meth:`Episode.step` takes one tool call and gives the messages that
follow (tool results, or what the user says), until ``done``; :meth:`Episode.outcome` says what it
was worth. An agent's turn is always one tool call. It speaks to the user by the tool that
:attr:`Environment.speak` names (``respond``), and ends by :attr:`Environment.finish` or by handing
over.

Whatever a model may do is a matter of the episode: an unknown tool, arguments of wrong types, a
broken rule. It answers with a message (and remembers), it never raises for it. What it raises is
:class:`InfrastructureError`, where a user simulator or another outside thing did not do its part;
such an episode is no failure of the model and counts apart. Any other exception is a bug and ends
the stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from refiner_core.contract.errors import RefinerError
from refiner_core.environments.record import EpisodeRecord, Failure


class InfrastructureError(RefinerError, RuntimeError):
    """Something outside the model kept an episode from going on: a user simulator that is down,
    slow or off-script, a tool's own time limit. The episode counts as none."""

    resumable = True

    def __init__(
        self, what: str, *, kind: str = "other", expected: str = "", fix: str = ""
    ) -> None:
        super().__init__(what, expected=expected, fix=fix)
        #: For counts: ``user_down``, ``user_slow``, ``user_off_script``, ``turn_timeout``,
        #: ``episode_timeout``, ``tool_crashed`` …
        self.kind = kind


@dataclass(frozen=True)
class Task:
    """One task. ``id`` is unique within an environment; ``data`` is JSON and all that the
    environment needs beside its own files. ``summary`` is one line for people."""

    id: str
    domain: str
    split: str
    summary: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class ToolSpec:
    """A tool as a model is told of it. ``parameters`` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The form of OpenAI and of chat templates."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """What a turn says."""

    name: str
    arguments: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """``{"name", "arguments"}``."""
        return {"name": self.name, "arguments": dict(self.arguments)}


@dataclass(frozen=True)
class Message:
    """What an agent is told: a tool's result, or the user's words."""

    role: Literal["user", "tool"]
    content: str


FAILURES: tuple[Failure, ...] = (
    "no_call",
    "limit",
    "rule_broken",
    "wrong_tool",
    "wrong_argument",
    "gave_up",
    "incomplete",
)


@dataclass(frozen=True)
class Check:
    """One thing that a task asks for. ``kind`` is ``action`` (a call was made), ``communicate``
    (something was said), ``environment`` (the state is as it should be), or another one that
    counts for nothing in partial credit."""

    kind: str
    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class Step:
    """What a call has led to. ``tool_error``: the tool refused it: ``wrong_tool``,
    ``wrong_argument``, ``rule_broken``, or empty. ``done``: there is no further turn."""

    messages: tuple[Message, ...]
    done: bool = False
    tool_error: Literal["", "wrong_tool", "wrong_argument", "rule_broken"] = ""


@dataclass(frozen=True)
class Outcome:
    """What an episode was worth.

    ``reward`` is the environment's own, 1.0 and more for a full success. ``components`` are its
    parts by name; ``excluded`` names those that were not measured and so not part of it.
    ``failure`` is None for a success. ``info`` is JSON of the environment's own, kept as it is.
    """

    reward: float
    checks: tuple[Check, ...]
    components: Mapping[str, float] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    failure: Failure | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def success(self) -> bool:
        """Whether it counts as solved."""
        return self.reward >= 1.0 - 1e-9


class Episode(Protocol):
    """One try at a task. Picklable between any two calls; one thread at a time."""

    def reset(self, seed: int) -> tuple[Message, ...]:
        """Begin (again): the first messages, the last of them the user's. The seed decides all
        randomness of a deterministic environment."""
        ...

    def step(self, call: ToolCall) -> Step:
        """Do what the agent wants; see the module for what may be raised."""
        ...

    def outcome(self) -> Outcome:
        """What it was worth, as it stands: also where it was broken off by a limit."""
        ...

    def close(self) -> None:
        """Give back what it holds. May be called twice."""
        ...


@runtime_checkable
class TellsProgress(Protocol):
    """An episode that can say in between how much is done: what ``credit=turn_rewards`` needs."""

    def checks(self) -> tuple[Check, ...]:
        """The checks as they stand now."""
        ...


@runtime_checkable
class HasExpert(Protocol):
    """An environment that can show how a task is done: what demonstrations are made of."""

    def expert(self, task: Task, seed: int, *, flawed: bool) -> Sequence[ToolCall]:
        """The calls of a whole episode that begins with ``reset(seed)``, in order. ``flawed``: with
        a mistake of the kinds that models make; the seed decides which."""
        ...


@runtime_checkable
class WritesResults(Protocol):
    """An environment whose own tools read results in a form of their own."""

    def results_file(
        self, records: Sequence[EpisodeRecord], folder: Path, *, agent: str = ""
    ) -> tuple[Path, ...]:
        """Write them; the files. ``records`` are those of one evaluation, errors included, the
        attempts at a task in order; ``agent`` names the model."""
        ...


class Environment(Protocol):
    """Makes episodes. Shared by threads; cheap to make again in another process."""

    @property
    def name(self) -> str:
        """As configured."""
        ...

    @property
    def version(self) -> str:
        """Changes whenever the same episode could end otherwise; part of every protocol."""
        ...

    @property
    def deterministic(self) -> bool:
        """Whether task, seed and calls decide everything."""
        ...

    @property
    def speak(self) -> str:
        """Name of the tool that speaks to the user."""
        ...

    @property
    def finish(self) -> str:
        """Name of the tool that ends an episode; empty where the user does."""
        ...

    def domains(self) -> tuple[str, ...]:
        """All domains in use, in order."""
        ...

    def tasks(self, split: str) -> tuple[Task, ...]:
        """The tasks of a split, domain by domain.

        Raises
        ------
        DataError
            A task file is malformed (it says where), or there is no such split.
        """
        ...

    def policy(self, domain: str) -> str:
        """The rules that the agent is told, as text."""
        ...

    def tools(self, domain: str) -> tuple[ToolSpec, ...]:
        """The agent's tools."""
        ...

    def episode(self, task: Task) -> Episode:
        """A try at a task that has not begun."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """JSON for protocols and cards: all that makes numbers comparable (version, user simulator
        with model and temperature, what is excluded), no address and no key."""
        ...
