"""The sequential test of proxy against gold: its false alarms and its power."""

from __future__ import annotations

import numpy as np
import pytest

from refiner_core.rewards.sequential import evidence

LOOKS, ROWS = 20, 64
TIME = np.linspace(0, 1, LOOKS + 1)
UP = 0.4 + 0.3 * TIME


def scores(rng: np.random.Generator, means: np.ndarray) -> np.ndarray:
    """Scores of rows that differ in difficulty, mostly close to 0 or 1."""
    mean = np.clip(means[:, None] + rng.normal(0, 0.15, ROWS), 0.05, 0.95)
    return rng.beta(1.5 * mean, 1.5 * (1 - mean))


def alarms(proxy: np.ndarray, gold: np.ndarray, runs: int, keep: float = 0.25) -> list[int]:
    rng, found = np.random.default_rng(7), []
    for _ in range(runs):
        one = evidence(scores(rng, proxy), scores(rng, gold), looks=LOOKS, keep=keep)
        found.append(one.first_alarm(0.05))
    return [point for point in found if point is not None]


@pytest.mark.parametrize(
    "gold",
    [UP, 0.4 + 0 * TIME + 0.25 * (UP - 0.4), np.minimum(UP, 0.5)],
    ids=["rises too", "keeps exactly its share", "saturates"],
)
def test_false_alarms_are_rare(gold: np.ndarray) -> None:
    proxy = np.minimum(UP, 0.5) if gold.max() == 0.5 else UP
    assert len(alarms(proxy, gold, 60)) <= 60 * 0.05


def test_nothing_is_seen_where_nothing_changes_or_both_fall() -> None:
    assert not alarms(0.5 + 0 * TIME, 0.5 + 0 * TIME, 40)
    assert not alarms(1 - UP, 1 - UP, 40)


def test_a_falling_gold_is_found_before_the_end() -> None:
    found = alarms(UP, 0.5 - 0.2 * TIME, 40)
    assert len(found) >= 36
    assert np.median(found) < LOOKS


def test_gold_that_first_rises_is_compared_with_its_peak() -> None:
    peak = 0.4 + 0.8 * np.minimum(TIME, 0.4) - 0.6 * np.maximum(0, TIME - 0.4)
    assert len(alarms(0.3 + 0.5 * TIME, peak, 40)) >= 32


def test_a_standing_gold_is_found_with_a_higher_share_to_keep() -> None:
    assert len(alarms(0.3 + 0.5 * TIME, 0.5 + 0 * TIME, 20, keep=0.75)) >= 18


def test_evidence_never_depends_on_later_points() -> None:
    rng = np.random.default_rng(1)
    proxy, gold = scores(rng, UP), scores(rng, 0.6 - 0.3 * TIME)
    whole = evidence(proxy, gold, looks=LOOKS)
    for point in range(1, LOOKS + 1):
        part = evidence(proxy[: point + 1], gold[: point + 1], looks=LOOKS)
        assert part.log_e.tolist() == whole.log_e[: point + 1].tolist()
    assert (np.diff(whole.log_e) >= 0).all()
    assert whole.since[-1] < LOOKS


def test_rows_without_a_score_are_left_out() -> None:
    rng = np.random.default_rng(1)
    proxy, gold = scores(rng, UP), scores(rng, 0.6 - 0.3 * TIME)
    fewer = evidence(np.delete(proxy, 5, axis=1), np.delete(gold, 5, axis=1), looks=LOOKS)
    proxy[:, 5] = np.nan
    assert evidence(proxy, gold, looks=LOOKS).log_e == pytest.approx(fewer.log_e)
    gold[:] = np.nan
    assert evidence(proxy, gold, looks=LOOKS).log_e[-1] == pytest.approx(0.0)


def test_series_outside_of_the_assumptions_are_refused() -> None:
    points = np.zeros((3, ROWS))
    with pytest.raises(ValueError, match="planned"):
        evidence(points, points, looks=1)
    with pytest.raises(ValueError, match="lie in"):
        evidence(points, points + 2, looks=2)
