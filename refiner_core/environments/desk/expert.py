"""The desk's expert: the calls of a perfect episode, or of one with a mistake.

In: a task and a seed. Out: calls in order, as demonstrations are made of.

A perfect episode is the task's solution with its sentences said in other ways. A flawed one has one
of the mistakes that models make, :data:`FLAWS`; the seed decides which, and one that does not keep
the task from being solved is passed over.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from refiner_core.environments.desk import words
from refiner_core.environments.desk.domain import FINISH, HAND_OVER, SPEAK
from refiner_core.environments.desk.episode import DeskEpisode, solution_of
from refiner_core.environments.protocol import Task, ToolCall
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


def _speaks(call: ToolCall) -> bool:
    return call.name == SPEAK


def _ends(call: ToolCall) -> bool:
    return call.name in (FINISH, HAND_OVER)


def _skips_asking(task: Task, calls: Calls, rng: random.Random) -> Calls | None:
    """The first tool is called with an id that nobody has named."""
    first = next((c for c in calls if not _speaks(c) and not _ends(c)), None)
    if first is None:
        return None
    name = next(iter(first.arguments))
    return [ToolCall(first.name, {**first.arguments, name: draw_id(rng)}), _FINISH]


def _wrong_argument(task: Task, calls: Calls, rng: random.Random) -> Calls | None:
    """One argument of one tool is another one; it goes on as if that were nothing."""
    places = [i for i, c in enumerate(calls) if not _speaks(c) and not _ends(c)]
    if not places:
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
    last = max((i for i, c in enumerate(calls) if not _speaks(c) and not _ends(c)), default=-1)
    kept = [*calls[: last + 1], calls[-1]]
    return kept if len(kept) < len(calls) else None


def _breaks_a_rule(task: Task, calls: Calls, rng: random.Random) -> Calls | None:
    """What the policy forbids is done right after the first tool, without asking."""
    tempting = task.data["tempting"]
    if tempting is None:
        return None
    first = next(i for i, c in enumerate(calls) if not _speaks(c))
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
