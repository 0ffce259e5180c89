"""The desk as an environment.

In: the configuration of the environment and of its user. Out: :class:`DeskEnvironment`,
:func:`desk_digest`. Torch-free.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.sections.environment import EnvironmentConfig, UserConfig
from refiner_core.environments.desk import user as scripted
from refiner_core.environments.desk import words
from refiner_core.environments.desk.domain import FINISH, HAND_OVER, SPEAK
from refiner_core.environments.desk.episode import DeskEpisode, solution_of
from refiner_core.environments.desk.tasks import DOMAINS, VERSION, own_tasks
from refiner_core.environments.protocol import Task, ToolCall, ToolSpec
from refiner_core.words import draw_id

Calls = list[ToolCall]
_FINISH = ToolCall(FINISH, {})


def expert_calls(task: Task, seed: int, *, flawed: bool) -> Calls:
    """The calls of an episode of this task, right or with a mistake."""
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
    return ToolCall(SPEAK, {"content": words.paraphrase(call.arguments["content"], rng)})


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
    """The first tool is called with an id that nobody has named."""
    if not (places := _tools(calls)):
        return None
    first = calls[places[0]]
    name = next(iter(first.arguments))
    return [ToolCall(first.name, {**first.arguments, name: draw_id(rng)}), _FINISH]


def _wrong_argument(task: Task, calls: Calls, rng: random.Random) -> Calls | None:
    """One argument of one tool is another one; it goes on as if that were nothing."""
    if not (places := _tools(calls)):
        return None
    place = rng.choice(places)
    call = calls[place]
    name = rng.choice(list(call.arguments))
    days = [day for day in words.DAYS if day != call.arguments[name]]
    other = rng.choice(days) if name == "day" else draw_id(rng)
    wrong = ToolCall(call.name, {**call.arguments, name: other})
    return [*calls[:place], wrong, *calls[place + 1 :]]


def _forgets_to_tell(task: Task, calls: Calls, rng: random.Random) -> Calls | None:
    """Nothing is said after the last tool."""
    last = max(_tools(calls), default=-1)
    kept = [*calls[: last + 1], calls[-1]]
    return kept if len(kept) < len(calls) else None


def _breaks_a_rule(task: Task, calls: Calls, rng: random.Random) -> Calls | None:
    """What the policy forbids is done right after the first tool, without asking."""
    tempting = task.data["tempting"]
    if tempting is None:
        return None
    first = next(i for i, c in enumerate(calls) if c.name != SPEAK)
    return [*calls[: first + 1], ToolCall(tempting[0], dict(tempting[1])), _FINISH]


def _ends_early(task: Task, calls: Calls, rng: random.Random) -> Calls | None:
    """It stops somewhere before the end."""
    return [*calls[: rng.randrange(1, max(2, len(calls) - 1))], _FINISH]


#: Mistakes by name.
FLAWS: dict[str, Callable[[Task, Calls, random.Random], Calls | None]] = {
    "skips_asking": _skips_asking,
    "wrong_argument": _wrong_argument,
    "forgets_to_tell": _forgets_to_tell,
    "breaks_a_rule": _breaks_a_rule,
    "ends_early": _ends_early,
}


@functools.cache
def _columns(domain: str) -> dict[str, dict[str, type]]:
    """Columns of the records of each table, as the desk's own tasks have them."""
    found: dict[str, dict[str, type]] = {}
    for task in own_tasks():
        for table, records in task.data["state"].items() if task.domain == domain else ():
            kinds = [{k: type(v) for k, v in record.items()} for record in records.values()]
            found[table] = next(iter(kinds), found.get(table, {}))
    return found


def read_tasks(path: str) -> tuple[Task, ...]:
    """The tasks of a file, one JSON object a line; blank lines are skipped.

    Raises
    ------
    DataError
        The file cannot be read, or a line is no task that can be solved: file, line and what is
        wrong.
    """
    fix = "correct it, or leave environment.tasks out for the desk's own tasks"
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"environment.tasks={path} cannot be read: {error}",
            expected="a file of tasks, JSON lines in UTF-8",
            fix=fix,
        ) from error
    tasks: dict[str, Task] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            task = Task(**json.loads(line))
            json.dumps(task.__dict__, ensure_ascii=False).encode()  # no half of a character
            _check_task(task)
            if task.id in tasks:
                raise ValueError(f"the id {task.id!r} stands in another line, too")
        except Exception as error:  # whatever playing it meets in what it was not made for
            raise DataError(
                f"{path}:{number} is no task that can be played: {type(error).__name__}: {error}",
                expected="a task as refiner_core/environments/README.md describes it",
                fix=fix,
            ) from error
        tasks[task.id] = task
    if not tasks:
        raise DataError(
            f"environment.tasks={path} holds no task", expected="a JSON object a line", fix=fix
        )
    return tuple(sorted(tasks.values(), key=lambda task: list(DOMAINS).index(task.domain)))


def _check_task(task: Task) -> None:
    """Play the solution: every call is taken, the last one ends it, and it is worth 1."""
    if task.domain not in DOMAINS:
        raise ValueError(f"there is no domain {task.domain!r}, only {', '.join(DOMAINS)}")
    columns, state = _columns(task.domain), task.data["state"]
    for table in {**columns, **state}:
        for key, record in state[table].items():
            if {k: type(v) for k, v in record.items()} != columns[table]:
                raise ValueError(
                    f"data.state.{table}.{key} has other keys or types than the desk's"
                )
    calls = solution_of(task)
    episode = DeskEpisode(task)
    episode.reset(0)
    for index, call in enumerate(calls):
        step = episode.step(call)
        if step.tool_error or step.done != (index == len(calls) - 1):
            how = step.messages[0].content if step.tool_error else "the last call ends an episode"
            raise ValueError(f"data.solution[{index}] ({call.name}) {step.tool_error}: {how}")
    outcome = episode.outcome()
    missed = [f"{c.kind} {c.name} {c.detail}".strip() for c in outcome.checks if not c.passed]
    if missed or all(check.kind == "environment" for check in outcome.checks):
        raise ValueError(f"data.solution solves nothing: {'; '.join(missed) or 'nothing is asked'}")


class DeskEnvironment:
    """A service desk of our own; see :class:`refiner_core.environments.protocol.Environment`.

    Parameters
    ----------
    config
        ``domains`` and ``tasks`` are used here.
    user
        Must name no model: the desk's user is scripted.

    Raises
    ------
    ConfigurationError
        A domain does not exist or stands twice, or a model is to be the user.
    DataError
        The task file cannot be used.
    """

    name = "desk"
    version = VERSION
    deterministic = True
    speak = SPEAK
    finish = FINISH

    def __init__(self, config: EnvironmentConfig, user: UserConfig) -> None:
        if user.model:
            raise ConfigurationError(
                f"The environment `desk` cannot have {user.model!r} as its user",
                expected="no model: its user is scripted, so that episodes repeat",
                fix="leave environment.user.model and evaluate.user.model empty",
            )
        self._domains = _domains(config)
        self._from_file = config.tasks is not None
        tasks = own_tasks() if config.tasks is None else read_tasks(config.tasks)
        self._tasks = tuple(
            task for domain in self._domains for task in tasks if task.domain == domain
        )

    def domains(self) -> tuple[str, ...]:
        """All domains in use, in order."""
        return self._domains

    def tasks(self, split: str) -> tuple[Task, ...]:
        """The tasks of a split, domain by domain."""
        chosen = tuple(task for task in self._tasks if task.split == split)
        if not chosen:
            splits = sorted({task.split for task in self._tasks})
            raise DataError(
                f"There are no tasks of the split {split!r} in {', '.join(self._domains)}",
                expected=f"one of {', '.join(splits)}" if splits else "tasks of these domains",
                fix="correct environment.train_split or environment.test_split, or add tasks of it",
            )
        return chosen

    def policy(self, domain: str) -> str:
        """The rules that the agent is told."""
        return DOMAINS[domain].policy

    def tools(self, domain: str) -> tuple[ToolSpec, ...]:
        """The agent's tools."""
        return DOMAINS[domain].specs

    def episode(self, task: Task) -> DeskEpisode:
        """A try at a task."""
        return DeskEpisode(task)

    def expert(self, task: Task, seed: int, *, flawed: bool) -> Sequence[ToolCall]:
        """The calls of a whole episode, right or with a mistake."""
        return expert_calls(task, seed, flawed=flawed)

    def describe(self) -> Mapping[str, Any]:
        """Version, tasks, user: all that makes numbers comparable."""
        return {
            "name": self.name,
            "version": self.version,
            "domains": list(self._domains),
            "tasks": "file" if self._from_file else "own",
            "digest": _digest(self._tasks),
            "user": "scripted",
            "excluded": [],
        }


def _domains(config: EnvironmentConfig) -> tuple[str, ...]:
    unknown = [name for name in config.domains if name not in DOMAINS]
    if unknown or len(set(config.domains)) != len(config.domains):
        raise ConfigurationError(
            f"environment.domains={','.join(config.domains)} is not possible with `desk`",
            expected=f"any of {', '.join(DOMAINS)}, each once",
            fix="correct environment.domains, or leave it empty for all",
        )
    return config.domains or tuple(DOMAINS)


def _digest(tasks: Sequence[Task]) -> str:
    """SHA-256 over tasks and everything that is said and allowed at the desk."""
    said = {
        name: [domain.policy, [spec.as_json() for spec in domain.specs]]
        for name, domain in DOMAINS.items()
    }
    phrases = {name: getattr(words, name) for name in dir(words) if name.isupper()}
    whole = [VERSION, said, phrases, scripted.PATIENCE, [task.__dict__ for task in tasks]]
    text = json.dumps(whole, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def desk_digest(config: EnvironmentConfig) -> str:
    """Digest of tasks and rules, for plans.

    Raises
    ------
    ConfigurationError, DataError
        As of :class:`DeskEnvironment`.
    """
    environment = DeskEnvironment(config, UserConfig())
    return str(environment.describe()["digest"])
