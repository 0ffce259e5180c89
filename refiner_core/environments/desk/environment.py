"""The desk as an environment.

In: the configuration of the environment and of its user. Out: :class:`DeskEnvironment`,
:func:`desk_digest`. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.sections.environment import EnvironmentConfig, UserConfig
from refiner_core.environments.desk import user as scripted
from refiner_core.environments.desk import vocabulary
from refiner_core.environments.desk.domain import FINISH, HAND_OVER, SPEAK
from refiner_core.environments.desk.episode import DeskEpisode, solution_of
from refiner_core.environments.desk.tasks import COUNTS, DOMAINS, VERSION, own_tasks
from refiner_core.environments.protocol import Task, ToolCall, ToolSpec
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
