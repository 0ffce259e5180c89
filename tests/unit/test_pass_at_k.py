"""pass@k and pass^k: exact values, errors and missing attempts."""

from fractions import Fraction
from itertools import combinations

from refiner_core.evaluation.metric_names import (
    of_domain,
    pass_at_k,
    pass_hat_k,
    pass_names,
    task_passes,
)


def test_both_equal_the_count_over_all_choices() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            attempts = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                chosen = list(combinations(attempts, k))
                some = Fraction(sum(map(any, chosen)), len(chosen))
                every = Fraction(sum(map(all, chosen)), len(chosen))
                assert pass_at_k(n, c, k) == float(some)
                assert pass_hat_k(n, c, k) == float(every)


def test_errors_count_as_no_attempt_and_too_few_attempts_give_no_number() -> None:
    assert pass_at_k(3, 3, 4) is None
    assert pass_hat_k(3, 0, 4) is None
    assert pass_at_k(0, 0, 1) is None
    found = task_passes([None, True, False, True], 4)
    assert found["pass@1_first"] is None, "the second attempt is not the first"
    assert found["pass@1"] == 2 / 3
    assert found["pass@3"] == 1.0
    assert found["pass@4"] is None
    assert found["pass^2"] == 1 / 3
    assert task_passes([None, None], 2) == dict.fromkeys(pass_names(2)), "no value, and never 0"
    found = task_passes([False, True, True, True], 4)
    assert (found["pass@1_first"], found["pass@1"]) == (0.0, 0.75)
    assert (found["pass@4"], found["pass^4"]) == (1.0, 0.0)


def test_a_metric_of_a_domain_is_about_the_tasks_of_that_domain() -> None:
    tasks = ["a/1", "b/1"]
    assert of_domain("pass@1/a", tasks) == [True, False]
    assert of_domain("pass@1", tasks) == [True, True]
