"""What an episode leaves: its turns, how it ended, and what it was worth.

In: what the runner saw. Out: :class:`EpisodeRecord`, with a JSON form that rollouts, evaluations,
reports and reward functions read. Nothing here is a token: ids stand in the
:class:`~refiner_core.contract.types.Completion`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: Why an episode failed, most telling first; of several that apply the first in this order counts.
#: ``no_call`` no tool call or one that cannot be read; ``wrong_tool`` a tool that does not exist;
#: ``wrong_argument`` arguments that a tool's schema refuses; ``rule_broken`` the policy forbids
#: what was done; ``limit`` turns or context ran out; ``gave_up`` ended or handed over before the
#: task was done; ``incomplete`` ended by itself with something missing or wrong.
Failure = Literal[
    "no_call", "limit", "rule_broken", "wrong_tool", "wrong_argument", "gave_up", "incomplete"
]

#: ``finished``: it has an outcome. ``error``: the infrastructure failed; it counts as none.
Status = Literal["finished", "error"]
#: What became of a turn's text; see :mod:`refiner_core.environments.turns`.
TurnStatus = Literal["ok", "no_call", "many_calls", "bad_json", "bad_shape", "too_long", "cut"]


@dataclass(frozen=True)
class TurnRecord:
    """One turn of the agent and what followed.

    ``text`` is what it sampled; ``repaired`` the text of a first attempt that was no call, if any:
    the turn's tokens are then those of the second, at temperature 0. Where that was no call either
    the tokens are those of the first, and ``retried`` is the text of the second.
    ``start`` and ``end`` are where its own tokens stand in the completion. ``messages`` are what it
    was told then, as (role, content). ``progress`` is the partial score after it (None where the
    environment does not tell). ``seconds``: tools and user.
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
        """Whether a second attempt was made, well or not."""
        return self.repaired is not None or self.retried is not None


@dataclass(frozen=True)
class EpisodeRecord:
    """A whole episode.

    ``reward`` (the environment's own), ``partial`` (weighted share of checks passed, None where a
    task has none) and ``failure`` are None where ``status`` is error, which ``error_kind`` and
    ``error`` then explain. ``ended``: ``done``, ``no_call``, ``turn_limit``, ``context_limit``,
    ``error``. ``first_messages`` are what the episode began with.
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
        """Whether the task was solved."""
        return self.reward is not None and self.reward >= 1.0 - 1e-9

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools called, in order."""
        return tuple(str(turn.call["name"]) for turn in self.turns if turn.call is not None)

    def as_json(self) -> dict[str, Any]:
        """Plain values; :func:`record_from_json` reads them."""
        values = dict(self.__dict__)
        values["turns"] = [
            {**turn.__dict__, "messages": [list(m) for m in turn.messages]} for turn in self.turns
        ]
        values["first_messages"] = [list(m) for m in self.first_messages]
        values["checks"] = [dict(check) for check in self.checks]
        values["components"], values["info"] = dict(self.components), dict(self.info)
        values["excluded"] = list(self.excluded)
        return values


def record_from_json(values: Mapping[str, Any]) -> EpisodeRecord:
    """The record again."""
    changed = dict(values)
    changed["turns"] = tuple(
        TurnRecord(**{**turn, "messages": tuple((r, c) for r, c in turn["messages"])})
        for turn in values["turns"]
    )
    changed["first_messages"] = tuple((r, c) for r, c in values["first_messages"])
    changed["checks"] = tuple(values["checks"])
    changed["excluded"] = tuple(values["excluded"])
    return EpisodeRecord(**changed)
