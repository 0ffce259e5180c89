"""The desk as an environment.

In: the configuration of the environment and of its user. Out: :class:`DeskEnvironment`,
:func:`desk_digest`. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.contract.environment_config import EnvironmentConfig, UserConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.environments.desk import user as scripted
from refiner_core.environments.desk import words
from refiner_core.environments.desk.domain import FINISH, SPEAK
from refiner_core.environments.desk.episode import DeskEpisode
from refiner_core.environments.desk.expert import expert_calls
from refiner_core.environments.desk.registry import DOMAINS
from refiner_core.environments.desk.task_files import read_tasks
from refiner_core.environments.desk.tasks import VERSION, own_tasks
from refiner_core.environments.protocol import Task, ToolCall, ToolSpec


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
    """What identifies tasks and rules for plans.

    Raises
    ------
    ConfigurationError, DataError
        As of :class:`DeskEnvironment`.
    """
    environment = DeskEnvironment(config, UserConfig())
    return str(environment.describe()["digest"])
