"""Check of a custom environment against its protocol, before a run needs it.

In: an :class:`~refiner_core.environments.protocol.Environment` and the number of tasks to try. Out:
findings, errors first. Episodes are really started and stepped; a user simulator behind an endpoint
is really called.

Checks: splits share no tasks; ids are unique; tools have names and schemas, and one speaks to the
user; every episode starts with the user's words; an unknown tool, wrong types and missing arguments
are answered with a message and a ``tool_error`` instead of an exception; with ``deterministic`` an
episode starts the same again; checks and rewards are valid; the expert, if there is one, solves
every task.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from refiner_core.contract.errors import DataError
from refiner_core.environments.protocol import (
    Environment,
    HasExpert,
    InfrastructureError,
    Task,
    ToolCall,
)

_SEED = 7
_NO_SPLIT = "no_such_split"
#: Values of a type that no string, number, boolean or list schema accepts.
_WRONG_VALUE = {"type": ["object"]}


Level = Literal["error", "warning"]


class EnvironmentFinding(NamedTuple):
    """``where`` is a split, domain, tool or task; ``what`` describes the problem."""

    level: Level
    where: str
    what: str


class EnvironmentCheck(NamedTuple):
    """Findings of a check. ``tasks`` counts the tried tasks, by split."""

    findings: tuple[EnvironmentFinding, ...]
    tasks: dict[str, int]
    expert_solved: int | None

    @property
    def errors(self) -> tuple[EnvironmentFinding, ...]:
        """Findings that would break a run."""
        return tuple(f for f in self.findings if f.level == "error")


def check_environment(
    environment: Environment, splits: Sequence[str], *, most: int | None = None
) -> EnvironmentCheck:
    """Try the environment; ``most`` tasks of each split, all by default."""
    by_split = {split: environment.tasks(split) for split in splits}
    found = [*_of_tasks(by_split), *_guarded(_NO_SPLIT, _of_no_split(environment))]
    for domain in environment.domains():
        found += _of_domain(environment, domain)
    expert = environment if isinstance(environment, HasExpert) else None
    solved, tried = 0, dict[str, int]()
    for split, tasks in by_split.items():
        count = len(tasks) if most is None else min(most, len(tasks))
        tried[split] = count
        for task in (tasks[i * len(tasks) // count] for i in range(count)):  # spread over all
            where = f"{task.domain}/{task.id}"
            found += _guarded(where, _of_task(environment, task))
            if expert is not None:
                wrong = list(_guarded(where, _of_expert(environment, expert, task)))
                solved += not wrong
                found += wrong
    found.sort(key=lambda finding: finding.level)  # errors before warnings
    return EnvironmentCheck(tuple(found), tried, None if expert is None else solved)


_Found = Iterator[tuple[Level, str]]


def _guarded(where: str, tried: _Found) -> Iterator[EnvironmentFinding]:
    """Findings at one place, including exceptions."""
    try:
        for level, what in tried:
            yield EnvironmentFinding(level, where, what)
    except InfrastructureError as error:
        yield EnvironmentFinding(
            "error", where, f"the infrastructure failed ({error.kind}): {error.what}"
        )
    except Exception as error:
        yield EnvironmentFinding("error", where, f"it raises {type(error).__name__}: {error}")


def _of_tasks(by_split: dict[str, tuple[Task, ...]]) -> Iterator[EnvironmentFinding]:
    names = Counter(task.id for tasks in by_split.values() for task in tasks)
    for name, count in names.items():
        if count > 1:
            yield EnvironmentFinding(
                "error", name, f"{count} tasks have this id, in one split or several"
            )
    for split, tasks in by_split.items():
        if not tasks:
            yield EnvironmentFinding("error", split, "the split has no tasks")


def _of_no_split(environment: Environment) -> _Found:
    """Check an unknown split: tasks of another split would leak into training or evaluation."""
    with contextlib.suppress(DataError):
        if environment.tasks(_NO_SPLIT):
            yield "error", "there is no such split, and it has tasks: a typing error passes"


def _of_domain(environment: Environment, domain: str) -> Iterator[EnvironmentFinding]:
    tools = environment.tools(domain)
    names = [tool.name for tool in tools]
    if not environment.policy(domain).strip():
        yield EnvironmentFinding("warning", domain, "the policy is empty")
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield EnvironmentFinding("error", f"{domain}.{name}", "two tools have this name")
    for wanted, what in ((environment.speak, "speaks to the user"), (environment.finish, "ends")):
        if wanted and wanted not in names:
            yield EnvironmentFinding("error", domain, f"no tool {wanted!r}, which {what}")
    for tool in tools:
        where = f"{domain}.{tool.name}"
        if tool.parameters.get("type") != "object":
            yield EnvironmentFinding("error", where, "its parameters are no schema of type object")
        if not tool.description.strip():
            yield EnvironmentFinding("warning", where, "it has no description")


def _of_task(environment: Environment, task: Task) -> _Found:
    """Findings of one task's episode under typical model behaviour."""
    if task.domain not in environment.domains():
        yield "error", f"its domain {task.domain!r} is none of the environment's"
        return
    episode = environment.episode(task)
    first = episode.reset(_SEED)
    if not first or first[-1].role != "user":
        yield "error", "its first messages do not end with the user's words"
    for call, wanted in _bad_calls(environment, task.domain):
        step, said = episode.step(call), f"{call.name} with {dict(call.arguments)!r:.60}"
        if step.tool_error != wanted:
            yield "error", f"{said} gives tool_error {step.tool_error!r} instead of {wanted!r}"
        if not step.messages and not step.done:
            yield "error", f"{said} is answered with nothing"
        if step.done:
            break
    outcome = episode.outcome()
    if outcome.success:
        yield "error", "an episode of nothing but wrong calls is a success"
    elif outcome.failure is None:
        yield "error", "an episode that failed does not say why (outcome().failure)"
    if not outcome.checks:
        yield "warning", "it has no checks: no partial credit, and no record of what was missing"
    episode.close()
    if environment.deterministic:
        again = environment.episode(task)
        if again.reset(_SEED) != first:
            yield "error", "it calls itself deterministic, and begins differently the second time"
        again.close()


def _bad_calls(environment: Environment, domain: str) -> Iterator[tuple[ToolCall, str]]:
    yield ToolCall("no_such_tool", {}), "wrong_tool"
    needing = (tool for tool in environment.tools(domain) if tool.parameters.get("required"))
    for tool in itertools.islice(needing, 1):
        yield ToolCall(tool.name, {}), "wrong_argument"
        wrong = dict.fromkeys(tool.parameters["required"], _WRONG_VALUE)
        yield ToolCall(tool.name, wrong), "wrong_argument"


def _of_expert(environment: Environment, expert: HasExpert, task: Task) -> _Found:
    calls = expert.expert(task, _SEED, flawed=False)
    episode = environment.episode(task)
    episode.reset(_SEED)
    for call in calls:
        episode.step(call)
    outcome = episode.outcome()
    episode.close()
    if not outcome.success:
        missing = ", ".join(check.name for check in outcome.checks if not check.passed)
        reward = f"reward {outcome.reward:g}; {outcome.failure}; missing: {missing or 'nothing'}"
        yield "error", f"its expert does not solve it ({reward})"
