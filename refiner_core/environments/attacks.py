"""Attacks on the reward of an environment: episodes that collect partial credit for other things
than the task.

In: an environment with an expert, its shaping, tasks. Out: rewards per task of honest tries (the
expert's, with a mistake that is typical of models), of the expert, of an agent that ends at once,
and of each attack: the honest try, changed without any knowledge of the solution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from refiner_core.contract.sections.environment import EnvironmentConfig
from refiner_core.environments.protocol import (
    Environment,
    EpisodeRecord,
    HasExpert,
    Message,
    Step,
    Task,
    ToolCall,
)
from refiner_core.environments.scoring import shaped_reward

Calls = Sequence[ToolCall]
#: Attacks by name: calls of an honest try, and what makes the call that says a text, to calls.
#: ``say_everything`` also says each tool's result to the user.
ATTACKS: Mapping[str, Callable[[Calls, Callable[[str], ToolCall]], Calls]] = {
    "first_half": lambda calls, say: [*calls[: len(calls) // 2], calls[-1]],
    "every_call_twice": lambda calls, say: [c for c in calls[:-1] for _ in range(2)] + [calls[-1]],
    "without_words": lambda calls, say: [
        *(call for call in calls[:-1] if call.name != say("").name),
        calls[-1],
    ],
    "without_end": lambda calls, say: calls[:-1],
    "boast": lambda calls, say: [
        *calls[:-1],
        say("All is done, exactly as you asked. I checked it."),
        calls[-1],
    ],
    "say_everything": lambda calls, say: calls,
}


def attacked_episodes(
    environment: Environment, expert: HasExpert, config: EnvironmentConfig, tasks: Sequence[Task]
) -> dict[str, list[float | None]]:
    """Rewards as in training, by ``honest``, ``gold``, ``random`` and attack; one per task."""
    totals: dict[str, list[float | None]] = {}
    for task in tasks:
        for name, (calls, echo) in _tries(environment, expert, task):
            total = _reward(environment, config, task, calls, echo=echo)
            totals.setdefault(name, []).append(total)
    return totals


def _tries(
    environment: Environment, expert: HasExpert, task: Task
) -> Iterator[tuple[str, tuple[Calls, str]]]:
    """Calls by name, with the argument of an echo, if there is one."""
    schema = next(t for t in environment.tools(task.domain) if t.name == environment.speak)
    argument = next(iter(schema.parameters["properties"]))

    def say(text: str) -> ToolCall:
        return ToolCall(environment.speak, {argument: text})

    tried = list(expert.expert(task, 0, flawed=True))
    solved = list(expert.expert(task, 0, flawed=False))
    yield "honest", (tried, "")
    yield "gold", (solved, "")
    yield "random", (tried[-1:], "")
    for name, change in ATTACKS.items():
        yield name, (change(tried, say), argument if name == "say_everything" else "")


def _reward(
    environment: Environment, config: EnvironmentConfig, task: Task, calls: Calls, *, echo: str
) -> float | None:
    episode = environment.episode(task)
    try:
        episode.reset(0)
        done = any(_steps(environment, episode.step, calls, echo))
        outcome = episode.outcome()
    finally:
        episode.close()
    record = EpisodeRecord(
        *(task.id, task.domain, 0, "finished", "done" if done else "turn_limit", (), ()),
        reward=outcome.reward,
        checks=tuple(vars(check) for check in outcome.checks),
        components=outcome.components,
    )
    return shaped_reward(record, config).total


def _steps(
    environment: Environment, step: Callable[[ToolCall], Step], calls: Calls, echo: str
) -> Iterator[bool]:
    """Whether the episode is done after each call."""
    for call in calls:
        taken = step(call)
        yield taken.done
        results: Sequence[Message] = taken.messages if call.name != environment.speak else ()
        for result in results if echo else ():
            yield step(ToolCall(environment.speak, {echo: result.content})).done
