"""The judge x policy matrix: every policy under every setting, and whether their order holds.

In: rollouts of several policies on the same prompts, with their scores under several settings. Out:
a mean with an interval per cell, each setting's ranking of the policies, and the pairs of policies
that two settings put in different orders, with paired differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.statistics import (
    Difference,
    Estimate,
    paired_difference_over_seeds,
)
from refiner_core.rescoring.compare import RESAMPLES, mean_of
from refiner_core.rescoring.rollouts import StoredRollout
from refiner_core.training.rollouts.advantages import EQUAL_REWARDS

#: Scores of a policy's rollouts: per setting, one value per rollout.
Values = Mapping[str, Sequence[float | None]]


class Reversal(NamedTuple):
    """Two policies that ``under`` puts in another order than ``than`` does, the first one ahead.

    The order is that of the means. The differences are first policy minus second, paired on prompts
    that both have a value for; where judgements failed they need not go the same way. ``clear``
    where the one is above 0 and the other below with their whole intervals.
    """

    policies: tuple[str, str]
    than: str
    under: str
    difference_than: Difference
    difference_under: Difference

    @property
    def clear(self) -> bool:
        """Whether both orders are more than luck."""
        low, high = self.difference_than.low, self.difference_under.high
        return low is not None and high is not None and low > 0 > high


class Matrix(NamedTuple):
    """``cells`` by policy, then setting; ``ranks`` by setting, then policy, best first: 1 is the
    best, and policies of one mean have one rank."""

    metric: str
    prompts: int
    cells: dict[str, dict[str, Estimate | None]]
    ranks: dict[str, dict[str, int]]
    reversals: tuple[Reversal, ...]


def prompts_of(rollouts: Sequence[StoredRollout]) -> dict[str, str]:
    """Prompt id -> what was asked."""
    return {r.prompt.sample_id: r.prompt.prompt_text for r in rollouts}


def common_prompts(
    policies: Mapping[str, Sequence[StoredRollout]], *, restrict: bool
) -> dict[str, list[StoredRollout]]:
    """The policies' rollouts on the prompts that all of them have.

    Parameters
    ----------
    policies
        Rollouts by policy.
    restrict
        Whether prompts that not all have may be left out.

    Raises
    ------
    ConfigurationError
        They have other prompts and ``restrict`` is off, or no prompt in common.
    """
    asked = {name: prompts_of(rollouts) for name, rollouts in policies.items()}
    (first, reference), *others = asked.items()
    for name, prompts in others:
        if prompts != reference and not restrict:
            shared = len(prompts.items() & reference.items())
            raise ConfigurationError(
                f"{first} and {name} cannot stand in one matrix: {first} has {len(reference)} "
                f"prompts and {name} {len(prompts)}, {shared} of them in common"
                f"{_odd(reference, prompts)}",
                expected="policies that were asked the same",
                fix="add --common to use the prompts that they share, choose --steps in which they "
                "were asked the same, or use `--from evaluation`",
            )
    common = set.intersection(*(set(prompts.items()) for prompts in asked.values()))
    if not common:
        raise ConfigurationError(
            f"{', '.join(policies)} have no prompt in common",
            expected="policies that were asked the same",
            fix="name runs on the same data",
        )
    ids = {prompt for prompt, _ in common}
    return {
        name: [r for r in rollouts if r.prompt.sample_id in ids]
        for name, rollouts in policies.items()
    }


def _odd(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    odd = sorted(set(a) ^ set(b)) or sorted(p for p in a if a[p] != b[p])
    return f" (such as {odd[0]}, on one side only)" if set(a) ^ set(b) else f" (other: {odd[0]})"


def make_matrix(
    metric: str,
    policies: Mapping[str, Sequence[StoredRollout]],
    values: Mapping[str, Values],
    *,
    resamples: int = RESAMPLES,
) -> Matrix:
    """The matrix of a metric. Settings stand in the order in which the first policy has them; the
    first of them is the one whose ranking the others are compared with.

    Parameters
    ----------
    metric
        What is averaged, for people.
    policies
        Rollouts by policy, on the same prompts (:func:`common_prompts`).
    values
        By policy and setting, one value per rollout; None where there is none.
    """
    settings = list(next(iter(values.values())))
    cells = {
        name: {
            setting: mean_of(rollouts, values[name][setting], resamples=resamples)
            for setting in settings
        }
        for name, rollouts in policies.items()
    }
    ranks = {s: _ranks({name: cells[name][s] for name in policies}) for s in settings}
    prompts = len(prompts_of(next(iter(policies.values()))))
    return Matrix(metric, prompts, cells, ranks, _reversals(policies, values, ranks))


def _ranks(column: Mapping[str, Estimate | None]) -> dict[str, int]:
    known = {name: e.value for name, e in column.items() if e is not None}
    slack = EQUAL_REWARDS * max(1.0, *map(abs, known.values())) if known else 0.0
    ranks = {
        name: 1 + sum(other > value + slack for other in known.values())
        for name, value in known.items()
    }
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _reversals(
    policies: Mapping[str, Sequence[StoredRollout]],
    values: Mapping[str, Values],
    ranks: Mapping[str, Mapping[str, int]],
) -> tuple[Reversal, ...]:
    (reference, order), *others = ranks.items()
    found = []
    for setting, other in others:
        for a, b in combinations(order, 2):
            known = a in other and b in other
            if known and (order[a] - order[b]) * (other[a] - other[b]) < 0:
                than, under = (
                    _difference((a, b), policies, values, s) for s in (reference, setting)
                )
                found.append(Reversal((a, b), reference, setting, than, under))
    return tuple(found)


def _difference(
    pair: tuple[str, str],
    policies: Mapping[str, Sequence[StoredRollout]],
    values: Mapping[str, Values],
    setting: str,
) -> Difference:
    sides: list[list[dict[str, Any]]] = [
        [
            {"sample_id": r.prompt.sample_id, "value": v}
            for r, v in zip(policies[name], values[name][setting], strict=True)
        ]
        for name in pair
    ]
    return paired_difference_over_seeds([sides[0]], [sides[1]], "value")
