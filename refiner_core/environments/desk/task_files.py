"""Tasks of one's own for the desk: a file of JSON lines, checked before anything is run.

In: a path. Out: :class:`Task` values, each of which can be played by any agent without a crash, and
is solved by its own solution.

A line is refused where its form is another than that of the desk's own tasks (the keys and types of
records are taken from those), or where playing its solution is refused, does not end, or does not
solve it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import DataError
from refiner_core.environments.desk.domain import FINISH, HAND_OVER
from refiner_core.environments.desk.episode import DeskEpisode, solution_of
from refiner_core.environments.desk.registry import DOMAINS
from refiner_core.environments.desk.tasks import own_tasks
from refiner_core.environments.protocol import Task

_KEYS = {"id", "domain", "split", "summary", "data"}
_DATA_KEYS = {"family", "state", "user", "tell", "solution", "tempting"}
_USER_KEYS = {"opening", "knows", "volunteers", "reactions"}
_DEVICE_KEYS = {"id", "cable", "wireless", "fresh", "broken"}
_REACTION_KEYS = {"hear", "say", "agree", "again", "end"}
_KINDS = {
    str: "a string",
    dict: "an object",
    list: "a list",
    bool: "true or false",
    int: "an integer",
}


class _Malformed(Exception):
    """What is wrong with a line, and what was expected; the reader adds file and line."""

    def __init__(self, what: str, expected: str) -> None:
        super().__init__(what)
        self.what, self.expected = what, expected


def read_tasks(path: str) -> tuple[Task, ...]:
    """The tasks of a file, one JSON object a line; blank lines are skipped.

    Raises
    ------
    DataError
        The file cannot be read, or a line is no task that can be solved: file, line, what is wrong
        and what was expected.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"environment.tasks={path} cannot be read: {error}",
            expected="a file of tasks, JSON lines in UTF-8",
            fix="correct environment.tasks, or leave it out for the desk's own tasks",
        ) from error
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            task = _task_of_line(line)
            if task.id in lines:
                raise _Malformed(
                    f"the id {task.id!r} stands in line {lines[task.id]} too",
                    "another id in every line",
                )
        except _Malformed as error:
            raise DataError(
                f"{path}:{number}: {error.what}",
                expected=error.expected,
                fix="correct that line; refiner_core/environments/README.md describes the form",
            ) from error
        lines[task.id] = number
        tasks.append(task)
    if not tasks:
        raise DataError(
            f"environment.tasks={path} holds no task",
            expected="a JSON object a line",
            fix="write tasks into it, or leave environment.tasks out for the desk's own",
        )
    return tuple(sorted(tasks, key=lambda task: list(DOMAINS).index(task.domain)))


def _task_of_line(line: str) -> Task:
    try:
        values = json.loads(line)
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"no JSON that can be used ({error})", "one JSON object") from error
    _has_keys(values, _KEYS, "the task")
    for key in ("id", "domain", "split", "summary"):
        _is(values[key], str, key)
    if values["domain"] not in DOMAINS:
        raise _Malformed(f"there is no domain {values['domain']!r}", f"one of {', '.join(DOMAINS)}")
    _check_data(values["data"], values["domain"])
    task = Task(**values)
    _check_solution(task)
    return task


def _has_keys(value: Any, keys: set[str], what: str) -> None:
    expected = f"an object with {', '.join(sorted(keys))}"
    if not isinstance(value, dict):
        raise _Malformed(f"{what} is no object", expected)
    missing, unknown = sorted(keys - set(value)), sorted(set(value) - keys)
    if missing:
        raise _Malformed(f"{what} lacks {', '.join(missing)}", expected)
    if unknown:
        raise _Malformed(f"{what} has the unknown {', '.join(unknown)}", expected)


def _is(value: object, kind: type, what: str) -> None:
    # bool is an int for Python, and nothing of the kind for JSON
    if type(value) is not kind:
        raise _Malformed(f"{what} is {json.dumps(value)[:40]}", _KINDS[kind])


def _all_are(value: Any, kind: type, what: str, *, least: int = 0) -> None:
    _is(value, list, what)
    if len(value) < least:
        raise _Malformed(f"{what} is empty", f"at least {least}")
    for index, one in enumerate(value):
        _is(one, kind, f"{what}[{index}]")


def _check_data(data: Any, domain: str) -> None:
    """The form of ``data``; whether it makes sense is seen when its solution is played."""
    _has_keys(data, _DATA_KEYS, "data")
    _is(data["family"], str, "data.family")
    _check_state(data["state"], domain)
    _check_user(data["user"], domain, data["state"])
    _is(data["tell"], list, "data.tell")
    for index, needles in enumerate(data["tell"]):
        _all_are(needles, str, f"data.tell[{index}]", least=1)
    _is(data["solution"], list, "data.solution")
    for index, call in enumerate(data["solution"]):
        _check_call(call, f"data.solution[{index}]")
    if data["tempting"] is not None:
        _check_call(data["tempting"], "data.tempting")


@functools.lru_cache(maxsize=1)
def _shapes() -> dict[str, dict[str, dict[str, type]]]:
    """Keys and types of records by domain and table, from the desk's own tasks."""
    shapes: dict[str, dict[str, dict[str, type]]] = {}
    for task in own_tasks():
        tables = shapes.setdefault(task.domain, {})
        for table, records in task.data["state"].items():
            tables.setdefault(table, {})
            for record in records.values():
                tables[table] = {key: type(value) for key, value in record.items()}
    return shapes


def _check_state(state: Any, domain: str) -> None:
    shapes = _shapes()[domain]
    _has_keys(state, set(shapes), "data.state")
    for table, records in state.items():
        _is(records, dict, f"data.state.{table}")
        for key, record in records.items():
            what = f"data.state.{table}.{key}"
            _has_keys(record, set(shapes[table]), what)
            for name, kind in shapes[table].items():
                _is(record[name], kind, f"{what}.{name}")


def _check_user(user: Any, domain: str, state: dict[str, Any]) -> None:
    has_device = domain == "devices"
    _has_keys(user, _USER_KEYS | ({"device"} if has_device else set()), "data.user")
    _is(user["opening"], str, "data.user.opening")
    _is(user["knows"], dict, "data.user.knows")
    for slot, value in user["knows"].items():
        _is(value, str, f"data.user.knows.{slot}")
    _all_are(user["volunteers"], str, "data.user.volunteers")
    for slot in user["volunteers"]:
        if slot not in user["knows"]:
            raise _Malformed(f"data.user.volunteers has {slot!r}", "slots of data.user.knows")
    _is(user["reactions"], list, "data.user.reactions")
    for index, reaction in enumerate(user["reactions"]):
        _check_reaction(reaction, f"data.user.reactions[{index}]")
    if has_device:
        _has_keys(user["device"], _DEVICE_KEYS, "data.user.device")
        for key, value in user["device"].items():
            _is(value, str, f"data.user.device.{key}")
        if user["device"]["id"] not in state["devices"]:
            raise _Malformed("data.user.device.id is not in data.state.devices", "one that is")


def _check_reaction(reaction: Any, what: str) -> None:
    _is(reaction, dict, what)
    whole = {"agree": "", "again": [], "end": False, **reaction}
    _has_keys(whole, _REACTION_KEYS, what)
    _all_are(whole["hear"], str, f"{what}.hear", least=1)
    _all_are(whole["say"], str, f"{what}.say", least=1)
    _is(whole["agree"], str, f"{what}.agree")
    _all_are(whole["again"], int, f"{what}.again")
    _is(whole["end"], bool, f"{what}.end")


def _check_call(call: Any, what: str) -> None:
    good = isinstance(call, list) and len(call) == 2
    if not good or not isinstance(call[0], str) or not isinstance(call[1], dict):
        raise _Malformed(f"{what} is {json.dumps(call)[:40]}", 'a call: ["TOOL", {ARGUMENTS}]')


def _check_solution(task: Task) -> None:
    """Play the solution: every call is taken, the last one ends it, and it is worth 1."""
    expected = "calls that the tools take, the last of them `finish` or `hand_over`"
    calls = solution_of(task)
    if not calls or calls[-1].name not in (FINISH, HAND_OVER):
        raise _Malformed("data.solution does not end the episode", expected)
    episode = DeskEpisode(task)
    episode.reset(0)
    for index, call in enumerate(calls):
        what = f"data.solution[{index}] ({call.name})"
        step = episode.step(call)
        if step.tool_error:
            told = step.messages[0].content
            raise _Malformed(f"{what} is refused ({step.tool_error}): {told}", expected)
        if step.done and index < len(calls) - 1:
            raise _Malformed(f"{what} ends the episode, and there are calls after it", expected)
    outcome = episode.outcome()
    missed = [check for check in outcome.checks if not check.passed]
    if missed:
        listed = "; ".join(f"{check.kind} {check.name} {check.detail}".strip() for check in missed)
        raise _Malformed(f"data.solution does not solve the task: {listed}", "one that does")
    if all(check.kind == "environment" for check in outcome.checks):
        raise _Malformed("the task asks for nothing", "a solution that asks, does or tells")
