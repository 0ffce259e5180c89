"""Parts of a domain of the desk, and the state that its tools change.

In: nothing but JSON. Out: :class:`Domain`, :class:`Desk`, :class:`ToolRefusal`, :class:`Draft` and
the random draws of tasks.

A tool is a function of the :class:`Desk` and the call's arguments; it changes the tables and
returns the result, or raises :class:`ToolRefusal`, which changes nothing. Arguments match the
schema.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from refiner_core.environments.desk import vocabulary
from refiner_core.environments.protocol import ToolSpec
from refiner_core.synthetic_words import draw_id, draw_name, draw_value

#: Tables of records, by table and key.
Tables = dict[str, dict[str, dict[str, Any]]]
Result = dict[str, Any]
Call = tuple[str, Mapping[str, Any]]


class ToolRefusal(Exception):
    """A tool's refusal. ``kind`` is the agent's mistake; the text is the message to it."""

    def __init__(self, kind: Literal["wrong_argument", "rule_broken"], text: str) -> None:
        super().__init__(text)
        self.kind: Literal["wrong_argument", "rule_broken"] = kind


def broken(text: str) -> ToolRefusal:
    """Refusal of an action that the policy forbids."""
    return ToolRefusal("rule_broken", text)


@dataclass
class Desk:
    """The state of an episode: the tables, what the user said so far, and its device.

    ``told`` holds by slot what the user has revealed, ``agreed`` what it agreed to,
    ``seen`` the records that the agent has looked up, ``device`` the user's own device, out of
    reach of tools, and ``doings`` what the user did to it. ``caller`` is the user's name, used for
    new records but otherwise unknown to the desk until the user says it.
    """

    tables: Tables
    caller: str = ""
    told: dict[str, str] = field(default_factory=dict)
    agreed: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    device: dict[str, str] = field(default_factory=dict)
    doings: list[str] = field(default_factory=list)

    def record(self, table: str, key: str) -> dict[str, Any]:
        """A record by its key."""
        record = self.tables[table].get(key)
        if record is None:
            raise ToolRefusal("wrong_argument", f"there is no {table[:-1]} {_short(key)}")
        return record

    def look_up(self, table: str, key: str) -> dict[str, Any]:
        """A record, marked as seen by the agent."""
        record = self.record(table, key)
        self.seen.add(key)
        return record

    def owned(self, table: str, key: str) -> dict[str, Any]:
        """A record that may be changed: looked up, and the user gave its owner's name."""
        record = self.record(table, key)
        if key not in self.seen:
            raise broken(f"not allowed, get the {table[:-1]} first")
        if "name" not in self.told:
            raise broken("not allowed, ask for the name first")
        if self.told["name"] != record["name"]:
            raise broken("not allowed, the name is wrong")
        return record


def _short(text: str, longest: int = 24) -> str:
    return text if len(text) <= longest else text[:longest] + "..."


Tool = Callable[[Desk, Mapping[str, Any]], Result]


#: A task without an id: its summary, and its data; see the README for their parts.
Draft = tuple[str, dict[str, Any]]


class Draw:
    """Random draws for one task; nothing is drawn twice with the same ``used`` set."""

    def __init__(self, rng: random.Random, used: set[str]) -> None:
        self.rng, self._used = rng, used

    def _new(self, draw: Callable[[random.Random], str]) -> str:
        while (text := draw(self.rng)) in self._used:
            pass
        self._used.add(text)
        return text

    def name(self) -> str:
        """A person."""
        return self._new(draw_name)

    def id(self) -> str:
        """An id such as ``S_k3F7``."""
        return self._new(draw_id)

    def value(self) -> str:
        """A room or an item, such as ``velm rota``."""
        return self._new(draw_value)

    def amount(self) -> int:
        """An amount of two digits."""
        return self.rng.randrange(12, 99)

    def days(self, count: int) -> list[str]:
        """Different days of the week."""
        return self.rng.sample(vocabulary.DAYS, count)


Family = Callable[[Draw], Draft]


@dataclass(frozen=True)
class Domain:
    """A domain: the agent's policy, its tools, and the families of its tasks."""

    name: str
    policy: str
    specs: tuple[ToolSpec, ...]
    tools: Mapping[str, Tool]
    families: Mapping[str, Family]
    #: The first is the meaning of ``id`` or ``number`` for a user of this domain.
    slots: tuple[str, ...]


def spec(name: str, description: str, *arguments: str) -> ToolSpec:
    """A tool whose arguments are all required strings."""
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {argument: {"type": "string"} for argument in arguments},
    }
    if arguments:
        parameters["required"] = list(arguments)
    return ToolSpec(name, description, parameters)


SPEAK, FINISH, HAND_OVER = "respond", "finish", "hand_over"
#: Tools of every domain.
COMMON: tuple[ToolSpec, ...] = (
    spec(SPEAK, "say it to the user", "content"),
    spec(FINISH, "end, all is done"),
    spec(HAND_OVER, "hand over to another agent", "reason"),
)


def respond(content: str) -> Call:
    """The call that says something to the user."""
    return SPEAK, {"content": content}


def finish() -> Call:
    """The call that ends an episode."""
    return FINISH, {}


def hand_over(reason: str) -> Call:
    """The call that hands the user over."""
    return HAND_OVER, {"reason": reason}


def calling(opening: str, knows: dict[str, str], volunteers: Sequence[str] = ()) -> dict[str, Any]:
    """A user without any reactions yet."""
    return {"opening": opening, "volunteers": volunteers, "knows": knows, "reactions": []}


def introduced(
    draw: Draw, what: str, key: str, name: str, opening: str
) -> tuple[dict[str, Any], list[Call]]:
    """A user with a request about one record (``what``), who may give its name unasked; and the
    calls up to the look-up."""
    volunteers = ["name"] if draw.rng.random() < 0.3 else []
    opening = f"my name is {name}. {opening}" if volunteers else opening
    user = calling(opening, {what: key, "name": name}, volunteers)
    slots = [slot for slot in (what, "name") if slot not in volunteers]
    return user, [respond(vocabulary.ask(slots)), (f"get_{what}", {what: key})]


class Scene:
    """Events of a task, with the calls of its solution; families extend it."""

    def __init__(self, user: dict[str, Any], calls: list[Call]) -> None:
        self.user, self.calls = user, calls
        self.tell: list[tuple[str, ...]] = []

    def says(self, text: str, *needles: str) -> None:
        """Add a message of the agent; the user must hear these phrases."""
        self.calls.append(respond(text))
        self.tell.append(needles)

    def reacts(self, hear: tuple[str, ...], say: tuple[str, ...], **more: Any) -> None:
        """Add a special answer of the user to a message with these phrases."""
        self.user["reactions"].append({"hear": hear, "say": say, **more})

    def answers(self, hear: tuple[str, ...], *, agrees: bool, to: str) -> None:
        """Add the user's consent or refusal to an offer."""
        more = {"agree": to} if agrees else {"end": True}
        self.reacts(hear, vocabulary.YES if agrees else vocabulary.NO, **more)

    def draft(self, summary: str, state: Tables, end: Call, tempting: Call | None = None) -> Draft:
        """The task."""
        ends = {"tell": self.tell, "solution": [*self.calls, end], "tempting": tempting}
        return summary, {"state": state, "user": self.user, **ends}
