"""The desk as an environment.

In: the configuration of the environment and of its user. Out: :class:`DeskEnvironment`,
:func:`desk_digest`, and of a task and its :class:`~.domain.Domain` an episode
(:class:`DeskEpisode`): tools, user, rules, checks and its value. Torch-free.

The expected end state is not stored: a task's ``solution`` is played once, with its own user, and
the resulting state, calls and actions of the user are compared with those of an agent's episode.
Formulas and classes of failure are in ``refiner_core/environments/README.md``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.sections.environment import EnvironmentConfig, UserConfig
from refiner_core.environments.desk import user as scripted
from refiner_core.environments.desk import vocabulary
from refiner_core.environments.desk.domain import (
    FINISH,
    HAND_OVER,
    SPEAK,
    Desk,
    Domain,
    ToolRefusal,
)
from refiner_core.environments.desk.tasks import COUNTS, DOMAINS, VERSION, own_tasks
from refiner_core.environments.desk.user import ScriptedUser
from refiner_core.environments.protocol import (
    Check,
    Failure,
    Message,
    Outcome,
    Step,
    Task,
    ToolCall,
    ToolSpec,
)
from refiner_core.synthetic_words import draw_id

Calls = list[ToolCall]
_FINISH = ToolCall(FINISH, {})


def expert_calls(task: Task, seed: int, *, flawed: bool) -> Calls:
    """The calls of an episode of this task, correct or with a mistake."""
    rng = random.Random(f"desk-expert/{task.id}/{seed}/{flawed}")
    calls = [_said(call, rng) for call in solution_of(task)]
    if not flawed:
        return calls
    for flaw in rng.sample(list(FLAWS), len(FLAWS)):
        changed = FLAWS[flaw](task, calls, rng)
        if changed is not None and _reward(task, changed) < 1.0:
            return changed
    return [_FINISH]


def _said(call: ToolCall, rng: random.Random) -> ToolCall:
    if call.name != SPEAK:
        return call
    return ToolCall(SPEAK, {"content": vocabulary.paraphrase(call.arguments["content"], rng)})


def _reward(task: Task, calls: Calls) -> float:
    episode = DeskEpisode(task)
    episode.reset(0)
    for call in calls:
        if episode.step(call).done:
            break
    return episode.outcome().reward


def _tools(calls: Calls) -> list[int]:
    """Places of calls that neither speak nor end."""
    return [i for i, c in enumerate(calls) if c.name not in (SPEAK, FINISH, HAND_OVER)]


def _skips_asking(task: Task, calls: Calls, rng: random.Random) -> Calls | None:
    """Call the first tool with an id that was never mentioned."""
    if not (places := _tools(calls)):
        return None
    first = calls[places[0]]
    name = next(iter(first.arguments))
    return [ToolCall(first.name, {**first.arguments, name: draw_id(rng)}), _FINISH]


def _wrong_argument(task: Task, calls: Calls, rng: random.Random) -> Calls | None:
    """Change one argument of one tool, and continue as if nothing happened."""
    if not (places := _tools(calls)):
        return None
    place = rng.choice(places)
    call = calls[place]
    name = rng.choice(list(call.arguments))
    days = [day for day in vocabulary.DAYS if day != call.arguments[name]]
    other = rng.choice(days) if name == "day" else draw_id(rng)
    wrong = ToolCall(call.name, {**call.arguments, name: other})
    return [*calls[:place], wrong, *calls[place + 1 :]]


def _forgets_to_tell(task: Task, calls: Calls, rng: random.Random) -> Calls | None:
    """Say nothing after the last tool."""
    last = max(_tools(calls), default=-1)
    kept = [*calls[: last + 1], calls[-1]]
    return kept if len(kept) < len(calls) else None


def _breaks_a_rule(task: Task, calls: Calls, rng: random.Random) -> Calls | None:
    """Do what the policy forbids right after the first tool, without asking."""
    tempting = task.data["tempting"]
    if tempting is None:
        return None
    first = next(i for i, c in enumerate(calls) if c.name != SPEAK)
    return [*calls[: first + 1], ToolCall(tempting[0], dict(tempting[1])), _FINISH]


def _ends_early(task: Task, calls: Calls, rng: random.Random) -> Calls | None:
    """Stop somewhere before the end."""
    return [*calls[: rng.randrange(1, max(2, len(calls) - 1))], _FINISH]


#: Mistakes by name.
FLAWS: dict[str, Callable[[Task, Calls, random.Random], Calls | None]] = {
    "skips_asking": _skips_asking,
    "wrong_argument": _wrong_argument,
    "forgets_to_tell": _forgets_to_tell,
    "breaks_a_rule": _breaks_a_rule,
    "ends_early": _ends_early,
}


class DeskEnvironment:
    """The shipped service desk; see :class:`refiner_core.environments.protocol.Environment`.

    Parameters
    ----------
    config
        ``domains`` is used here.
    user
        Must name no model: the desk's user is scripted.

    Raises
    ------
    ConfigurationError
        A domain does not exist or is repeated, a model is set as user, or a file names tasks.
    """

    name = "desk"
    version = VERSION
    deterministic = True
    speak = SPEAK
    finish = FINISH

    def __init__(self, config: EnvironmentConfig, user: UserConfig) -> None:
        if user.model or config.tasks is not None:
            raise ConfigurationError(
                f"The environment `desk` has a scripted user and tasks of its own, and no other "
                f"({user.model or config.tasks})",
                expected="no model and no file: its episodes are reproducible",
                fix="leave environment.user.model, evaluate.user.model and environment.tasks empty",
            )
        self._domains = config.domains or tuple(DOMAINS)
        if not set(self._domains) <= set(DOMAINS) or len({*self._domains}) != len(self._domains):
            raise ConfigurationError(
                f"environment.domains={','.join(self._domains)} is not possible with `desk`",
                expected=f"any of {', '.join(DOMAINS)}, each once",
                fix="correct environment.domains, or leave it empty for all",
            )
        self._tasks = tuple(
            task for domain in self._domains for task in own_tasks() if task.domain == domain
        )

    def domains(self) -> tuple[str, ...]:
        """All domains in use, in order."""
        return self._domains

    def tasks(self, split: str) -> tuple[Task, ...]:
        """The tasks of a split, domain by domain."""
        chosen = tuple(task for task in self._tasks if task.split == split)
        if not chosen:
            raise DataError(
                f"There are no tasks of the split {split!r} in {', '.join(self._domains)}",
                expected=f"one of {', '.join(sorted(COUNTS))}",
                fix="correct environment.train_split or environment.test_split",
            )
        return chosen

    def policy(self, domain: str) -> str:
        """The agent's rules."""
        return DOMAINS[domain].policy

    def tools(self, domain: str) -> tuple[ToolSpec, ...]:
        """The agent's tools."""
        return DOMAINS[domain].specs

    def episode(self, task: Task) -> DeskEpisode:
        """An attempt at a task."""
        return DeskEpisode(task)

    def expert(self, task: Task, seed: int, *, flawed: bool) -> Sequence[ToolCall]:
        """The calls of a whole episode, correct or with a mistake."""
        return expert_calls(task, seed, flawed=flawed)

    def describe(self) -> Mapping[str, Any]:
        """Version, tasks, user: everything that affects comparability."""
        return {
            "name": self.name,
            "version": self.version,
            "domains": list(self._domains),
            "tasks": "own",
            "digest": _digest(self._tasks),
            "user": "scripted",
            "excluded": [],
        }


def _digest(tasks: Sequence[Task]) -> str:
    """SHA-256 over tasks, texts and rules of the desk."""
    said = {
        name: [domain.policy, [spec.as_json() for spec in domain.specs]]
        for name, domain in DOMAINS.items()
    }
    phrases = {name: getattr(vocabulary, name) for name in dir(vocabulary) if name.isupper()}
    whole = [VERSION, said, phrases, scripted.PATIENCE, [task.__dict__ for task in tasks]]
    text = json.dumps(whole, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def desk_digest(config: EnvironmentConfig) -> str:
    """Digest of tasks and rules, for plans.

    Raises
    ------
    ConfigurationError
        See :class:`DeskEnvironment`.
    """
    environment = DeskEnvironment(config, UserConfig())
    return str(environment.describe()["digest"])


def fault(schema: Mapping[str, Any], arguments: object) -> str:
    """Message to a model about invalid arguments; empty if they are valid."""
    if not isinstance(arguments, Mapping):
        return "arguments are no object"
    properties: Mapping[str, Any] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"{name} is required"
    for name, value in arguments.items():
        if name not in properties:
            return f"there is no {str(name)[:24]}"
        if not isinstance(value, str):  # as every argument at the desk
            return f"{name} is no string"
    return ""


KINDS = ("action", "communicate", "environment")
Ended = Literal["", "finished", "handed_over", "user_left"]


@dataclass(frozen=True)
class _ExpectedEpisode:
    """Traces of a solved episode: questions to the user, calls of tools, actions of the
    user, tables, its device."""

    asked: tuple[str, ...]
    calls: tuple[tuple[str, str], ...]
    doings: tuple[str, ...]
    tables: Mapping[str, Any]
    device: Mapping[str, str]


class DeskEpisode:
    """One attempt at a task; see :class:`refiner_core.environments.protocol.Episode`."""

    def __init__(self, task: Task, expected: _ExpectedEpisode | None = None) -> None:
        self._task = task
        self._expected = expected or _expected_of(task)
        self._begin(0)

    def _begin(self, seed: int) -> None:
        data = self._task.data
        device = data["user"].get("device", {})
        caller = data["user"]["knows"].get("name", "")
        self._desk = Desk(copy.deepcopy(data["state"]), caller=caller, device=dict(device))
        self._user = ScriptedUser(data["user"], data["tell"], self._domain.slots, seed)
        self._calls: list[tuple[str, str]] = []
        self._errors: list[str] = []
        self._rules: list[str] = []
        self._ended: Ended = ""

    @property
    def _domain(self) -> Domain:
        return DOMAINS[self._task.domain]

    def reset(self, seed: int) -> tuple[Message, ...]:
        """Start (again): the user's opening."""
        self._begin(seed)
        return (Message("user", self._user.open(self._desk)),)

    def step(self, call: ToolCall) -> Step:
        """Execute the agent's call. Faults of a call are reported to it, and remembered."""
        if self._ended:
            return Step((), done=True)
        spec = next((spec for spec in self._domain.specs if spec.name == call.name), None)
        if spec is None:
            return self._refuse("wrong_tool", f"there is no tool {str(call.name)[:24]}")
        wrong = fault(spec.parameters, call.arguments)
        if wrong:
            return self._refuse("wrong_argument", wrong)
        if call.name == SPEAK:
            text = self._user.answer(call.arguments["content"], self._desk)
            self._ended = "user_left" if self._user.left else ""
            return Step((Message("user", text),), done=bool(self._ended))
        if call.name in (FINISH, HAND_OVER):
            self._ended = "finished" if call.name == FINISH else "handed_over"
            self._calls.append(_key(call.name, call.arguments))
            return Step((), done=True)
        try:
            result = self._domain.tools[call.name](self._desk, call.arguments)
        except ToolRefusal as error:
            return self._refuse(error.kind, str(error))
        self._calls.append(_key(call.name, call.arguments))
        return Step((Message("tool", json.dumps(result, ensure_ascii=False)),))

    def _refuse(
        self, kind: Literal["wrong_tool", "wrong_argument", "rule_broken"], text: str
    ) -> Step:
        self._errors.append(kind)
        if kind == "rule_broken":
            self._rules.append(text)
        message = Message("tool", json.dumps({"error": text}, ensure_ascii=False))
        return Step((message,), tool_error=kind)

    def checks(self) -> tuple[Check, ...]:
        """The checks in their current state."""
        told = [
            Check("communicate", f"tell {i}", i in self._user.told, ", ".join(needles))
            for i, needles in enumerate(self._task.data["tell"])
        ]
        return (*self._actions(), *told, *self._states())

    def _actions(self) -> list[Check]:
        asked = [
            Check("action", f"ask {slot}", slot in self._desk.told) for slot in self._expected.asked
        ]
        calls = [
            Check("action", name, (name, arguments) in self._calls, arguments)
            for name, arguments in self._expected.calls
        ]
        doings = [
            Check("action", f"user {doing}", doing in self._desk.doings)
            for doing in self._expected.doings
        ]
        return asked + calls + doings

    def _states(self) -> list[Check]:
        checks = [
            Check("environment", name, self._desk.tables[name] == table)
            for name, table in self._expected.tables.items()
            if table or self._desk.tables[name]
        ]
        if self._expected.device:
            same = self._desk.device == self._expected.device
            needed = set(self._desk.doings) <= set(self._expected.doings)
            checks.append(Check("environment", "device", same and needed))
        return checks

    def outcome(self) -> Outcome:
        """The outcome: 1 if it has ended, all checks passed and no rule was broken."""
        checks = self.checks()
        kinds = [kind for kind in KINDS if any(check.kind == kind for check in checks)]
        components = {
            kind: float(all(check.passed for check in checks if check.kind == kind))
            for kind in kinds
        }
        components["rules"] = float(not self._rules)
        components["ended"] = float(bool(self._ended))
        reward = 1.0
        for value in components.values():
            reward *= value
        info = {
            "family": self._task.data["family"],
            "ended": self._ended,
            "rules_broken": list(self._rules),
            "refused": len(self._errors),
            "useless_messages": self._user.useless,
        }
        failure = None if reward == 1.0 else self._failure(checks)
        return Outcome(reward, checks, components, failure=failure, info=info)

    def _failure(self, checks: Sequence[Check]) -> Failure:
        """The first applicable class in the order of the protocol."""
        if not self._ended:
            return "limit"
        for kind in ("rule_broken", "wrong_tool", "wrong_argument"):
            if kind in self._errors:
                return kind
        called = {name for name, _ in self._calls}
        missed = [check for check in checks if check.kind == "action" and not check.passed]
        if any(check.name in called for check in missed):
            return "wrong_argument"
        wants_hand_over = any(name == HAND_OVER for name, _ in self._expected.calls)
        if self._ended == "handed_over" and not wants_hand_over:
            return "gave_up"
        done = any(
            check.passed
            for check in checks
            if check.kind != "environment" and not check.name.startswith("ask ")
        )
        return "incomplete" if done or self._ended == "user_left" else "gave_up"

    def close(self) -> None:
        """Do nothing: there are no resources."""


def _key(name: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """A call's key for comparisons; the words of a hand-over do not matter."""
    shown = {} if name in (HAND_OVER, FINISH) else dict(arguments)
    return name, json.dumps(shown, ensure_ascii=False, sort_keys=True)


def solution_of(task: Task) -> list[ToolCall]:
    """The calls of a task's solution."""
    return [ToolCall(name, dict(arguments)) for name, arguments in task.data["solution"]]


def _expected_of(task: Task) -> _ExpectedEpisode:
    """Traces of a task's solution."""
    episode = DeskEpisode(task, _ExpectedEpisode((), (), (), {}, {}))
    episode.reset(0)
    for call in solution_of(task):
        episode.step(call)
    calls = dict.fromkeys(call for call in episode._calls if call[0] != FINISH)
    volunteered = task.data["user"]["volunteers"]
    return _ExpectedEpisode(
        asked=tuple(slot for slot in episode._desk.told if slot not in volunteered),
        calls=tuple(calls),
        doings=tuple(dict.fromkeys(episode._desk.doings)),
        tables=episode._desk.tables,
        device=episode._desk.device,
    )
