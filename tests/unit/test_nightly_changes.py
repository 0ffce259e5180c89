"""Changes and noise over many nights: false alarms, detection, calendar."""

from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from refiner_core.contract.errors import ConfigurationError
from refiner_core.nightly.changes import Change, NightPoint, Values, read_series, reportable
from refiner_core.nightly.definition import Schedule

PROMPTS = tuple(f"p{i:03d}" for i in range(60))
NIGHTS = [(date(2026, 1, 1) + timedelta(days=i)).isoformat() for i in range(60)]
#: Spread of one prompt's score from night to night, and the error of a difference that it makes.
SPREAD = 0.1
ERROR = SPREAD * (2 / len(PROMPTS)) ** 0.5
Floats = npt.NDArray[np.float64]


class Told(NamedTuple):
    """Reported changes of one series and its canary."""

    canary: list[Change]
    model: list[Change]


def series(rng: np.random.Generator, shared: Floats, own: Floats) -> list[NightPoint]:
    """A fresh measurement each night: prompts differ, nights add ``shared`` and ``own``."""
    base = rng.uniform(0.2, 0.8, len(PROMPTS))
    noise = rng.normal(0, SPREAD, (len(shared), len(PROMPTS)))
    values = base + noise + (shared + own)[:, None]
    return [NightPoint(n, n, n, Values(PROMPTS, v)) for n, v in zip(NIGHTS, values, strict=False)]


def told(seed: int, nights: int = 60, *, own: Any = 0.0, shared: Any = 0.0) -> Told:
    rng = np.random.default_rng(seed)
    whole = np.zeros(nights) + shared
    canary = series(rng, whole, np.zeros(nights))
    model = series(rng, whole, np.zeros(nights) + own)
    return Told(
        reportable(read_series(canary, None)[0], "any", canary=True),
        reportable(read_series(model, canary)[0], "any", canary=False),
    )


def from_night(number: int, amount: float, nights: int = 60) -> Floats:
    """Nothing, and ``amount`` from a night on."""
    return np.where(np.arange(nights) >= number, amount, 0.0)


@pytest.mark.slow
def test_a_thousand_quiet_series_hardly_ever_alarm_in_sixty_nights() -> None:
    """500 pairs of a model and a canary, each measured afresh in each of 60 nights. At most one
    series in a hundred may alarm; measured at this size: about one in a thousand."""
    found = [told(seed) for seed in range(500)]
    alarms = sum(bool(t.canary) + bool(t.model) for t in found)
    assert alarms <= 10, f"{alarms} of 1000 series"


def test_nights_that_move_everything_a_little_do_not_alarm_either() -> None:
    """What all prompts share in a night (load, other batches) is no sampling of prompts: a paired
    interval alone would alarm in most series."""
    alarms = 0
    for seed in range(100):
        load = np.random.default_rng(10_000 + seed).normal(0, ERROR, 60)
        found = told(seed, shared=load)
        alarms += bool(found.canary) + bool(found.model)
    assert alarms <= 6, f"{alarms} of 200 series"


@pytest.mark.parametrize("amount", [6.0, 10.0])
def test_a_regression_of_six_errors_is_found_within_three_nights(amount: float) -> None:
    found = [told(s, 33, own=from_night(30, -amount * ERROR, 33)).model for s in range(100)]
    soon = [t for t in found if t and t[-1].night in NIGHTS[30:33]]
    assert len(soon) >= 90
    assert all(t[-1].direction == -1 for t in soon)
    as_model = sum(t[-1].cause == "model" for t in soon)
    assert as_model >= 0.75 * len(soon), "the others are told too, as not clear"


def test_a_lenient_judge_is_never_taken_for_progress() -> None:
    """From night 30 on every score is higher, of the canary and of the models alike."""
    found = [told(seed, 40, shared=from_night(30, 8 * ERROR, 40)) for seed in range(150)]
    drift = sum(any(c.cause == "drift" for c in t.canary) for t in found)
    progress = sum(any(c.cause == "model" for c in t.model) for t in found)
    assert drift >= 145
    assert progress <= 1, f"{progress} of 150 called progress"


def test_a_change_of_one_night_is_not_reported() -> None:
    once = np.zeros(60)
    once[30] = -12 * ERROR
    assert not any(told(seed, own=once).model for seed in range(30))


def test_a_recovery_follows_a_reported_change() -> None:
    own = from_night(20, -12 * ERROR) - from_night(40, -12 * ERROR)
    for seed in range(10):
        changes = told(seed, own=own).model
        assert [(c.kind, c.direction) for c in changes] == [("change", -1), ("recovery", 1)]


def test_only_the_relevant_direction_is_reported() -> None:
    rng = np.random.default_rng(0)
    canary = series(rng, np.zeros(40), np.zeros(40))
    better = read_series(series(rng, np.zeros(40), from_night(30, 12 * ERROR, 40)), canary)[0]
    assert [c.direction for c in better] == [1]
    assert reportable(better, "drop", canary=False) == []
    assert reportable(better, "rise", canary=False) == list(better)


def test_without_a_canary_no_change_of_the_model_is_claimed() -> None:
    rng = np.random.default_rng(0)
    model = series(rng, np.zeros(40), from_night(30, -12 * ERROR, 40))
    canary = [p for p in series(rng, np.zeros(40), np.zeros(40)) if p.night < NIGHTS[30]]
    (change,) = read_series(model, canary)[0]
    assert (change.cause, change.canary) == ("unclear", None)


def test_the_canary_speaks_of_the_nights_in_which_numbers_were_made() -> None:
    """A number that is kept while the judge drifts was made before: it has no part in it."""
    rng = np.random.default_rng(1)
    canary = series(rng, from_night(10, 0.5, 20), np.zeros(20))
    first = series(rng, np.zeros(1), np.zeros(1))[0]
    kept = [NightPoint(n, NIGHTS[0], first.digest, first.values) for n in NIGHTS[:20]]
    assert read_series(kept, canary)[0] == ()


# ---------------------------------------------------------------- nights


def test_a_night_has_the_date_of_its_own_zone_when_clocks_are_changed_too() -> None:
    berlin = Schedule("30 2 * * *", "Europe/Berlin")
    # On 29 March 2026 there is no half past two in Berlin; the night is at three.
    spring = [datetime(2026, 3, day, 1, 30, tzinfo=UTC) for day in (28, 29, 30)]
    assert [berlin.night_at(m) for m in spring] == ["2026-03-28", "2026-03-29", "2026-03-30"]
    assert berlin.begins("2026-03-29").isoformat() == "2026-03-29T03:00:00+02:00"
    # On 25 October it comes twice; the night once.
    autumn = [datetime(2026, 10, day, 12, tzinfo=UTC) for day in (24, 25, 26)]
    assert [berlin.night_at(m) for m in autumn] == ["2026-10-24", "2026-10-25", "2026-10-26"]


def test_moments_of_the_kind_that_prefect_has_mean_the_same_night() -> None:
    from pendulum import datetime as moment

    berlin = Schedule("0 3 * * *", "Europe/Berlin")
    assert berlin.night_at(moment(2026, 11, 21, 2, 0, tz="UTC")) == "2026-11-21"
    assert berlin.next_after(moment(2026, 11, 21, 2, 0, tz="UTC")).day == 22


def test_a_night_starts_at_its_scheduled_minute() -> None:
    utc = Schedule("0 3 * * 1-5", "UTC")
    assert utc.night_at(datetime(2026, 11, 20, 3, 0, tzinfo=UTC)) == "2026-11-20"  # a Friday
    assert utc.night_at(datetime(2026, 11, 20, 2, 59, 59, tzinfo=UTC)) == "2026-11-19"
    assert utc.night_at(datetime(2026, 11, 22, 12, tzinfo=UTC)) == "2026-11-20"
    with pytest.raises(ConfigurationError, match="no night of 2026-11-21"):
        utc.begins("2026-11-21")
