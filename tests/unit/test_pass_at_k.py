"""pass@k and pass^k: what stands in a table of agents is what its name says."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

from refiner_core.evaluation.metric_names import (
    pass_at_k,
    pass_hat_k,
    pass_names,
    task_passes,
)


def test_four_attempts_with_three_successes() -> None:
    assert [pass_hat_k(4, 3, k) for k in (1, 2, 3, 4)] == [0.75, 0.5, 0.25, 0.0]
    assert [pass_at_k(4, 3, k) for k in (1, 2, 3, 4)] == [0.75, 1.0, 1.0, 1.0]
    assert [pass_at_k(4, 1, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_both_are_what_counting_all_choices_gives() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            attempts = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                chosen = list(combinations(attempts, k))
                some = Fraction(sum(map(any, chosen)), len(chosen))
                every = Fraction(sum(map(all, chosen)), len(chosen))
                assert pass_at_k(n, c, k) == float(some)
                assert pass_hat_k(n, c, k) == float(every)


def test_with_fewer_attempts_than_k_there_is_no_number() -> None:
    assert pass_at_k(3, 3, 4) is None
    assert pass_hat_k(3, 0, 4) is None
    assert pass_at_k(0, 0, 1) is None


def test_an_attempt_that_the_infrastructure_ended_counts_as_none() -> None:
    found = task_passes([None, True, False, True], 4)
    assert found["pass@1_first"] is None, "the second attempt is not the first"
    assert found["pass@1"] == 2 / 3
    assert found["pass@3"] == 1.0
    assert found["pass@4"] is None
    assert found["pass^2"] == 1 / 3
    assert task_passes([None, None], 2) == dict.fromkeys(pass_names(2)), "no value, and never 0"


def test_the_first_attempt_is_another_number_than_pass_at_1() -> None:
    tasks: list[list[bool | None]] = [
        [False, True, True, True],
        [True, False, False, False],
        [None, True, True, None],
    ]
    found = [task_passes(task, 4) for task in tasks]
    assert [f["pass@1_first"] for f in found] == [0.0, 1.0, None]
    assert [f["pass@1"] for f in found] == [0.75, 0.25, 1.0]
    assert [f["pass@4"] for f in found] == [1.0, 1.0, None]
    assert [f["pass^4"] for f in found] == [0.0, 0.0, None]
    assert task_passes([None], 1)["pass@1"] is None
