"""Rubric sets, protocols and environments: list, show, check, play.

In: shipped names or files. Out: values, and findings of checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from flows.checking.sources import protocol_sources
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import replace_fields, suggest
from refiner_core.contract.loading import load_recipe, read_overrides
from refiner_core.contract.marks import FieldInfo, walk
from refiner_core.contract.protocols import (
    FIELDS,
    ProtocolFile,
    protocol_fingerprint,
    refused_under,
)
from refiner_core.contract.recipes import (
    description_of,
    find_protocol,
    load_protocol,
    shipped_protocols,
)
from refiner_core.contract.records import picked
from refiner_core.contract.sections.environment import check_name
from refiner_core.environments import checking
from refiner_core.environments.protocol import Environment, Message, Outcome, Task, ToolCall
from refiner_core.environments.registry import open_environment
from refiner_core.rubrics import RubricSet, load_rubric_set, rubric_set_path, shipped_rubric_sets

#: Environment name -> its purpose.
ENVIRONMENTS: Mapping[str, str] = {
    "desk": "refiner's own service desk: bookings, orders, devices; a scripted user; runs anywhere",
    "tau2": "tau2-bench (airline, retail, telecom), where it is installed; its user is a model",
    "FILE.py:NAME": "your own: the result of NAME(config, user) in that file",
}


# ---------------------------------------------------------------- rubrics and protocols


def list_rubric_sets() -> list[RubricSet]:
    """List the shipped rubric sets.

    Returns
    -------
    list of RubricSet
        By name.

    Raises
    ------
    ConfigurationError
        A set is damaged, and so is the installation.
    """
    return [load_rubric_set(name) for name in shipped_rubric_sets()]


def show_rubric_set(name: str) -> tuple[RubricSet, Path]:
    """A rubric set and its file.

    Parameters
    ----------
    name
        A shipped name or a YAML file.

    Returns
    -------
    RubricSet, Path
        The set, and its file.

    Raises
    ------
    ConfigurationError
        There is no such set, or the file is no rubric set.
    """
    return load_rubric_set(name), rubric_set_path(name)


def list_protocols() -> list[ProtocolFacts]:
    """List the shipped protocols.

    Returns
    -------
    list of ProtocolFacts
        By name.

    Raises
    ------
    ConfigurationError
        A protocol is damaged, and so is the installation.
    """
    return [show_protocol(name) for name in shipped_protocols()]


def show_protocol(name: str) -> ProtocolFacts:
    """Read a protocol, and its fingerprint.

    Parameters
    ----------
    name
        A shipped name or a YAML file.

    Returns
    -------
    ProtocolFacts
        The content of ``refiner protocols show``.

    Raises
    ------
    ConfigurationError
        There is no such protocol, or the file is none.
    """
    path, protocol = find_protocol(name), load_protocol(name)
    with refused_under(protocol.name):
        sources = protocol_sources(protocol.over(RecipeConfig()))
    fingerprint = protocol_fingerprint(protocol, sources)
    return ProtocolFacts(path, protocol, description_of(path), fingerprint)


def check_protocol(file: str, recipe: str = "tiny") -> ProtocolFacts:
    """Check a protocol's fields and values, with a recipe's other fields.

    Parameters
    ----------
    file
        A shipped name or a YAML file.
    recipe
        Recipe with the other fields.

    Returns
    -------
    ProtocolFacts
        Facts of the protocol.

    Raises
    ------
    ConfigurationError
        It is no protocol; the message names the field.
    """
    known = show_protocol(file)
    config = load_recipe(recipe)
    evaluate = replace(config.evaluate, protocols=(known.protocol.text,))
    check_config(replace(config, evaluate=evaluate))
    return known


def protocol_fields() -> dict[str, FieldInfo]:
    """The fields that a protocol may fix.

    Returns
    -------
    dict
        Path to field: its default, mark and explanation.

    Raises nothing.
    """
    known = dict(walk(RecipeConfig))
    return {path: known[path] for path in FIELDS}


# ---------------------------------------------------------------- environments


@dataclass(frozen=True)
class ProtocolFacts:
    """A protocol, its file, and the fingerprint of its effective settings."""

    path: Path
    protocol: ProtocolFile
    description: str
    fingerprint: str

    def as_json(self) -> dict[str, Any]:
        """The facts as JSON."""
        return {
            **picked(self.protocol, "name", "sections", "text"),
            **picked(self, "fingerprint", "description"),
            **{"file": str(self.path), "fixed": self.protocol.values()},
        }


class PlayedTask(NamedTuple):
    """A played task, and its outcome."""

    task: Task
    outcome: Outcome


def list_environments() -> Mapping[str, str]:
    """The environments that a recipe may name in ``environment.name``.

    Returns
    -------
    dict
        Name to purpose.

    Raises nothing.
    """
    return ENVIRONMENTS


def environment_config(name: str, overrides: Sequence[str] = ()) -> RecipeConfig:
    """A configuration with that environment, and defaults otherwise.

    Parameters
    ----------
    name
        As in ``environment.name``.
    overrides
        ``key=value``, such as ``environment.domains=[orders]``.

    Returns
    -------
    RecipeConfig
        For :func:`flows.api.show_environment` and the others.

    Raises
    ------
    ConfigurationError
        The name or an override is invalid.
    """
    check_name(name)
    values = read_overrides([f"environment.name={json.dumps(name)}", *overrides], Path.cwd())
    return replace_fields(RecipeConfig(), values)


def show_environment(
    name: str, overrides: Sequence[str] = ()
) -> tuple[Environment, dict[str, tuple[Task, ...]]]:
    """An environment, and its tasks by split.

    Parameters
    ----------
    name, overrides
        As of :func:`flows.api.environment_config`.

    Returns
    -------
    Environment, dict
        The environment, and split to tasks.

    Raises
    ------
    ConfigurationError
        There is no such environment, or its settings are invalid.
    UnsupportedError
        A requirement is not installed.
    """
    config = environment_config(name, overrides)
    environment = open_environment(config, evaluation=False)
    splits = (config.environment.train_split, config.environment.test_split)
    return environment, {split: environment.tasks(split) for split in splits}


def check_environment(
    name: str, overrides: Sequence[str] = (), *, most: int | None = None
) -> checking.EnvironmentCheck:
    """Check an environment against its protocol, by trying its tasks.

    Parameters
    ----------
    name, overrides
        As of :func:`flows.api.environment_config`.
    most
        Maximum number of tasks tried per split.

    Returns
    -------
    Checked
        Findings; how many tasks were tried, and how many its expert solves.

    Raises
    ------
    ConfigurationError, UnsupportedError
        As of :func:`flows.api.show_environment`.
    """
    environment, tasks = show_environment(name, overrides)
    return checking.check_environment(environment, tuple(tasks), most=most)


def find_task(tasks: Mapping[str, Sequence[Task]], task: str | None = None) -> Task:
    """A task by its id.

    Parameters
    ----------
    tasks
        From :func:`flows.api.show_environment`.
    task
        Its id, with or without its domain (default: the first).

    Returns
    -------
    Task
        The task.

    Raises
    ------
    ConfigurationError
        There is no such task; the message names the nearest.
    """
    known = [one for of_split in tasks.values() for one in of_split]
    wanted = (task or "").rpartition("/")[2]
    for one in known:
        if task is None or one.id == wanted:
            return one
    ids = [one.id for one in known]
    raise ConfigurationError(
        f"There is no task {task!r}.{suggest(wanted, ids)}",
        expected=f"one of {len(known)}, such as {ids[0]}" if ids else "an environment with tasks",
        fix="see `refiner environments show NAME --tasks`",
    )


def play_task(
    name: str,
    calls: Iterable[ToolCall],
    overrides: Sequence[str] = (),
    *,
    task: str | None = None,
    seed: int = 0,
    hear: Callable[[Sequence[Message]], None] = lambda messages: None,
) -> PlayedTask:
    """Play a task with given tool calls, until it is over or there are no more.

    Parameters
    ----------
    name, overrides
        As of :func:`flows.api.environment_config`.
    calls
        Tool calls in order.
    task
        Its id (default: the first).
    seed
        Seed of the episode.
    hear
        Receives the messages, at the beginning and after each call.

    Returns
    -------
    PlayedTask
        The task, and its outcome with reward and checks.

    Raises
    ------
    ConfigurationError, UnsupportedError
        As of :func:`flows.api.show_environment`; or there is no such task.
    """
    environment, tasks = show_environment(name, overrides)
    chosen = find_task(tasks, task)
    episode = environment.episode(chosen)
    try:
        hear(episode.reset(seed))
        for call in calls:
            step = episode.step(call)
            hear(step.messages)
            if step.done:
                break
        return PlayedTask(chosen, episode.outcome())
    finally:
        episode.close()
