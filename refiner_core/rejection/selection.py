"""Which attempts at a prompt are kept. Pure.

In: all attempts at one prompt, scored. Out: for each, whether it is kept, and why or why not.

1. What cannot be a demonstration is out: no score (the judge or the infrastructure failed), no
   single readable answer or tool call at the end (``malformed``), cut off by a limit
   (``truncated``). A model that is shown a cut-off text learns not to end.
2. Every full success is kept: a score of at least ``sample.success``. Of several that are the same
   by ``sample.distinct`` one is, and no more than ``sample.max_kept``.
3. Without one, the best attempt is kept if its partial score is at least ``sample.min_partial``.

Where some of several have to be chosen it is the better score, then the lower number: nothing
depends on when an attempt was finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from refiner_core.contract.config import SampleConfig

#: Scores are sums of products; what is this close to a threshold has reached it.
EPSILON = 1e-9
#: Why an attempt is no candidate. ``unscored``: the judge failed; ``error``: the infrastructure
#: did; ``no_reward``: its prompt has nothing to be rewarded for; the others are the policy's.
Flaw = Literal["", "error", "unscored", "no_reward", "malformed", "truncated"]
#: What became of an attempt.
Why = Literal[
    "full_success",
    "best_partial",
    "error",
    "unscored",
    "no_reward",
    "malformed",
    "truncated",
    "duplicate",
    "surplus",
    "too_low",
    "not_best",
    "not_full",
]
#: Those that are kept.
KEPT: tuple[Why, ...] = ("full_success", "best_partial")
WORDS: dict[str, str] = {
    "full_success": "a full success",
    "best_partial": "the best attempt at a prompt without a full success",
    "error": "ended by an error of the infrastructure",
    "unscored": "the judge failed",
    "no_reward": "its prompt has nothing to be rewarded for",
    "malformed": "it ends with what cannot be read",
    "truncated": "it was cut off by a limit",
    "duplicate": "the same as one that is kept",
    "surplus": "more than sample.max_kept",
    "too_low": "the best one, below sample.min_partial",
    "not_best": "another one of its prompt is better",
    "not_full": "its prompt has full successes",
}


@dataclass(frozen=True)
class Candidate:
    """As much of an attempt as the rule looks at.

    Attributes
    ----------
    index
        Its number among the attempts at its prompt.
    flaw
        Why it cannot be kept; empty where it can.
    score
        Its reward, 1 being full; None where it has none.
    partial
        Its partial score in [0, 1]; None where it has none.
    tools
        The tools that it called, in order; None for an answer without tools.
    text
        What it said.
    """

    index: int
    flaw: Flaw
    score: float | None
    partial: float | None
    tools: tuple[str, ...] | None
    text: str


class Choice(NamedTuple):
    """Whether an attempt is kept, and why or why not."""

    kept: bool
    why: Why


def is_full(candidate: Candidate, rule: SampleConfig) -> bool:
    """Whether it is a full success: scored high enough, ended by itself, readable."""
    score = candidate.score
    return not candidate.flaw and score is not None and score >= rule.success - EPSILON


def form_of(candidate: Candidate, rule: SampleConfig) -> tuple[object, ...]:
    """What two attempts have in common that are the same by ``sample.distinct``."""
    if rule.distinct == "none":
        return (candidate.index,)
    if rule.distinct == "tools" and candidate.tools is not None:
        return candidate.tools
    return (candidate.text,)


def choose(candidates: Sequence[Candidate], rule: SampleConfig) -> list[Choice]:
    """What becomes of each of one prompt's attempts, in order."""
    found: dict[int, Choice] = {}
    for place, candidate in enumerate(candidates):
        if candidate.flaw:
            found[place] = Choice(False, candidate.flaw)
    left = [place for place in range(len(candidates)) if place not in found]
    full = [place for place in left if is_full(candidates[place], rule)]
    if full:
        found |= {place: Choice(False, "not_full") for place in left}
        found |= _of_successes(candidates, full, rule)
    elif left:
        found |= _of_partial(candidates, left, rule)
    return [found[place] for place in range(len(candidates))]


def _of_successes(
    candidates: Sequence[Candidate], places: Sequence[int], rule: SampleConfig
) -> dict[int, Choice]:
    found: dict[int, Choice] = {}
    forms: set[tuple[object, ...]] = set()
    for place in sorted(places, key=lambda p: (-_number(candidates[p].score), candidates[p].index)):
        form = form_of(candidates[place], rule)
        if form in forms:
            found[place] = Choice(False, "duplicate")
        elif rule.max_kept is not None and len(forms) >= rule.max_kept:
            found[place] = Choice(False, "surplus")
        else:
            forms.add(form)
            found[place] = Choice(True, "full_success")
    return found


def _of_partial(
    candidates: Sequence[Candidate], places: Sequence[int], rule: SampleConfig
) -> dict[int, Choice]:
    best = min(places, key=lambda p: (-_number(candidates[p].partial), candidates[p].index))
    partial = candidates[best].partial
    enough = partial is not None and partial >= rule.min_partial - EPSILON
    found = {place: Choice(False, "not_best") for place in places}
    found[best] = Choice(True, "best_partial") if enough else Choice(False, "too_low")
    return found


def _number(value: float | None) -> float:
    return float("-inf") if value is None else value
