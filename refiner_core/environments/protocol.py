"""Protocol of environments: tasks, tools, messages, steps, outcomes; records of episodes; rows of
tasks.

In: nothing. Out: types. Torch-free and tokenizer-free: environments exchange text.

An *environment* offers tasks in domains. An *episode* is one attempt at a task:
:meth:`Episode.reset` returns the first messages, each :meth:`Episode.step` takes one tool call and
returns the following messages (tool results or the user's words), until ``done``;
:meth:`Episode.outcome` returns its value. An agent's turn is always one tool call. It speaks to the
user with the tool named by :attr:`Environment.speak` (``respond``), and ends with
:attr:`Environment.finish` or a hand-over.

The episode handles every action of a model: an unknown tool, arguments of wrong types, a broken
rule. It answers with a message (and remembers), and never raises for it. It raises
:class:`InfrastructureError` if a user simulator or another outside component failed; such an
episode is no failure of the model and is counted separately. Any other exception is a bug and ends
the stage.

The runner's view of an episode is an :class:`EpisodeRecord`, with a JSON form for rollouts,
evaluations, reports and reward functions; token ids are in the
:class:`~refiner_core.contract.types.Completion`.

A task passes through stages as a prepared prompt: in its
:class:`~refiner_core.contract.types.PromptRow`, ``sample_id`` is ``DOMAIN/ID``, ``question`` its
summary, ``prompt_text`` the task as JSON, ``prompt_ids`` the common prefix of its episodes (policy
and tools, up to the first message of the user), and ``refiner_mode`` is :data:`TASK_MODE`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from refiner_core.contract.errors import DataError, RefinerError
from refiner_core.contract.records import from_json, to_json
from refiner_core.contract.types import PromptRow

#: Why an episode failed, most telling first; the first applicable one counts.
#: ``no_call`` no tool call or an unreadable one; ``wrong_tool`` a tool that does not exist;
#: ``wrong_argument`` arguments that a tool's schema refuses; ``rule_broken`` an action that the
#: policy forbids; ``limit`` turns or context ran out; ``gave_up`` ended or handed over before the
#: task was done; ``incomplete`` ended by itself with something missing or wrong.
Failure = Literal[
    "no_call", "limit", "rule_broken", "wrong_tool", "wrong_argument", "gave_up", "incomplete"
]

#: ``finished``: it has an outcome. ``error``: the infrastructure failed; it does not count.
Status = Literal["finished", "error"]
#: Results of parsing a turn; see :mod:`refiner_core.environments.turns`.
TurnStatus = Literal["ok", "no_call", "many_calls", "bad_json", "bad_shape", "too_long", "cut"]


@dataclass(frozen=True)
class TurnRecord:
    """One turn of the agent with the messages after it.

    ``text`` is the sampled text; ``repaired`` the text of a first attempt that was no call, if any:
    the turn's tokens are then those of the second, at temperature 0. If that was no call either,
    the tokens are those of the first, and ``retried`` is the text of the second.
    ``start`` and ``end`` delimit its own tokens in the completion. ``messages`` are the following
    messages, as (role, content). ``seconds``: tools and user. ``progress``: the partial score
    after it, in older records.
    """

    text: str
    status: TurnStatus
    start: int
    end: int
    call: Mapping[str, Any] | None = None
    repaired: str | None = None
    retried: str | None = None
    tool_error: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    progress: float | None = None
    seconds: float = 0.0

    @property
    def tried_again(self) -> bool:
        """True if a second attempt was made, successful or not."""
        return self.repaired is not None or self.retried is not None


@dataclass(frozen=True)
class EpisodeRecord:
    """A whole episode.

    ``reward`` (the environment's own), ``partial`` (weighted share of passed checks, None for a
    task without any) and ``failure`` are None if ``status`` is error, explained by ``error_kind``
    and ``error``. ``ended``: ``done``, ``no_call``, ``turn_limit``, ``context_limit``,
    ``error``. ``first_messages`` are the messages of the reset.
    """

    task_id: str
    domain: str
    seed: int
    status: Status
    ended: Literal["done", "no_call", "turn_limit", "context_limit", "error"]
    first_messages: tuple[tuple[str, str], ...]
    turns: tuple[TurnRecord, ...]
    reward: float | None = None
    partial: float | None = None
    first_progress: float | None = None
    checks: tuple[Mapping[str, Any], ...] = ()
    components: Mapping[str, float] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    failure: Failure | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    error_kind: str = ""
    error: str = ""

    @property
    def success(self) -> bool:
        """True if the task was solved."""
        return self.reward is not None and self.reward >= 1.0 - 1e-9

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools called, in order."""
        return tuple(str(turn.call["name"]) for turn in self.turns if turn.call is not None)

    def as_json(self) -> dict[str, Any]:
        """Plain values for :func:`record_from_json`."""
        values: dict[str, Any] = to_json(self)
        return values


def record_from_json(values: Mapping[str, Any]) -> EpisodeRecord:
    """Record from its JSON form."""
    return from_json(EpisodeRecord, values)


class InfrastructureError(RefinerError, RuntimeError):
    """An outside failure stopped an episode: a user simulator that is down, slow or off-script, a
    tool's own time limit. The episode does not count."""

    resumable = True

    def __init__(
        self, what: str, *, kind: str = "other", expected: str = "", fix: str = ""
    ) -> None:
        super().__init__(what, expected=expected, fix=fix)
        #: Kind for counts: ``user_down``, ``user_slow``, ``user_off_script``, ``turn_timeout``,
        #: ``episode_timeout``, ``tool_crashed`` …
        self.kind = kind


@dataclass(frozen=True)
class Task:
    """One task. ``id`` is unique within an environment; ``data`` is JSON, everything that the
    environment needs besides its own files. ``summary`` is one line for people."""

    id: str
    domain: str
    split: str
    summary: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class ToolSpec:
    """A tool as described to a model. ``parameters`` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The form used by OpenAI and chat templates."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A turn's call."""

    name: str
    arguments: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """``{"name", "arguments"}``."""
        return {"name": self.name, "arguments": dict(self.arguments)}


@dataclass(frozen=True)
class Message:
    """Message to an agent: a tool's result, or the user's words."""

    role: Literal["user", "tool"]
    content: str


FAILURES: tuple[Failure, ...] = get_args(Failure)


@dataclass(frozen=True)
class Check:
    """One requirement of a task. ``kind`` is ``action`` (a call was made), ``communicate``
    (something was said), ``environment`` (the state is correct), or another one, which does not
    count in partial credit."""

    kind: str
    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class Step:
    """Result of a call. ``tool_error`` is why the tool refused it: ``wrong_tool``,
    ``wrong_argument``, ``rule_broken``, or empty. ``done``: no further turn."""

    messages: tuple[Message, ...]
    done: bool = False
    tool_error: Literal["", "wrong_tool", "wrong_argument", "rule_broken"] = ""


@dataclass(frozen=True)
class Outcome:
    """Value of an episode.

    ``reward`` is the environment's own, 1.0 or more for a full success. ``components`` are its
    parts by name; ``excluded`` names parts that were not measured and so not included.
    ``failure`` is None for a success. ``info`` is the environment's own JSON, stored unchanged.
    """

    reward: float
    checks: tuple[Check, ...]
    components: Mapping[str, float] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    failure: Failure | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def success(self) -> bool:
        """True if it counts as success."""
        return self.reward >= 1.0 - 1e-9


class Episode(Protocol):
    """One attempt at a task; used by one thread at a time."""

    def reset(self, seed: int) -> tuple[Message, ...]:
        """Start (again): the first messages, the last of them the user's. The seed decides all
        randomness of a deterministic environment."""

    def step(self, call: ToolCall) -> Step:
        """Execute the agent's call; see the module for allowed exceptions."""

    def outcome(self) -> Outcome:
        """The value as it stands, also after a limit ended the episode."""

    def close(self) -> None:
        """Release resources. May be called twice."""


@runtime_checkable
class HasExpert(Protocol):
    """An environment that can demonstrate tasks, for SFT."""

    def expert(self, task: Task, seed: int, *, flawed: bool) -> Sequence[ToolCall]:
        """The calls of a whole episode after ``reset(seed)``, in order. ``flawed``: with a
        mistake typical of models, chosen by the seed."""


class Environment(Protocol):
    """A factory of episodes, shared by threads."""

    @property
    def name(self) -> str:
        """As configured."""

    @property
    def version(self) -> str:
        """Version; changes whenever the same episode could end differently; part of every
        protocol."""

    @property
    def deterministic(self) -> bool:
        """True if task, seed and calls determine everything."""

    @property
    def speak(self) -> str:
        """Name of the tool that speaks to the user."""

    @property
    def finish(self) -> str:
        """Name of the tool that ends an episode; empty if the user ends it."""

    def domains(self) -> tuple[str, ...]:
        """All domains in use, in order."""

    def tasks(self, split: str) -> tuple[Task, ...]:
        """The tasks of a split, domain by domain.

        Raises
        ------
        DataError
            A task file is malformed (the message says where), or the split does not exist.
        """

    def policy(self, domain: str) -> str:
        """The agent's rules, as text."""

    def tools(self, domain: str) -> tuple[ToolSpec, ...]:
        """The agent's tools."""

    def episode(self, task: Task) -> Episode:
        """A new attempt at a task, not started."""

    def describe(self) -> Mapping[str, Any]:
        """JSON for protocols and cards: everything that affects comparability (version, user
        simulator with model and temperature, exclusions), without addresses and keys."""


#: The ``refiner_mode`` of rows that are tasks.
TASK_MODE = "task"


def row_of_task(task: Task, prompt_ids: tuple[int, ...]) -> PromptRow:
    """A task as a row."""
    values = {**vars(task), "data": dict(task.data)}
    text = json.dumps(values, ensure_ascii=False, sort_keys=True)
    return PromptRow(
        sample_id=f"{task.domain}/{task.id}",
        question=task.summary,
        prompt_text=text,
        prompt_ids=prompt_ids,
        rubrics="",
        refiner_mode=TASK_MODE,
    )


def task_of_row(row: PromptRow) -> Task:
    """The task of a row.

    Raises
    ------
    DataError
        The row is not of a task.
    """
    if row.refiner_mode != TASK_MODE:
        raise DataError(
            f"{row.sample_id} is no task of an environment (refiner_mode {row.refiner_mode!r})",
            expected="rows that the data stage has made with environment.name set",
            fix="run the data stage of this recipe again",
        )
    values: dict[str, Any] = json.loads(row.prompt_text)
    return Task(**values)


def domain_of_id(sample_id: str) -> str:
    """The domain of a task's row, from its ``sample_id``."""
    return sample_id.partition("/")[0]


def over_domains(rows: Sequence[PromptRow], most: int | None) -> list[PromptRow]:
    """At most ``most`` rows, in their order: the first ones of each domain, in proportion to its
    share. A larger number includes the rows of a smaller one."""
    if most is None or len(rows) <= most:
        return list(rows)
    of_domain = Counter(domain_of_id(row.sample_id) for row in rows)
    met = Counter[str]()
    places = []
    for place, row in enumerate(rows):
        domain = domain_of_id(row.sample_id)
        met[domain] += 1
        places.append(((met[domain] - 0.5) / of_domain[domain], place))
    return [rows[place] for place in sorted(place for _, place in sorted(places)[:most])]
