"""Which limits a sweep would pass, and how much of it fits. Pure.

In: a forecast and the limits of a sweep file. Out: a :class:`Passed` for each limit that cannot
hold, with what would fit; :func:`refuse_what_cannot_fit` says it before anything is launched. Where
the numbers of some stages are unknown, what is known already passes the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from refiner_core.contract.errors import ConfigurationError
from sweeps.forecast import SweepForecast, TrialShare
from sweeps.values import Limits

GIB = 2**30


@dataclass(frozen=True)
class Passed:
    """A limit that the sweep would pass.

    Attributes
    ----------
    field, unit
        ``gpu_hours``, ``judge_calls`` or ``disk_gb`` of ``limits:``, and its unit for people.
    allowed, needed
        In that unit; ``needed`` includes what has been used already.
    at_least
        Some stages have no number, so more may be needed.
    fits
        How many trials fit, in their order; None where that is not how it is counted (disk).
    what_fits
        The same in words.
    """

    field: str
    unit: str
    allowed: float
    needed: float
    at_least: bool
    fits: int | None
    what_fits: str

    @property
    def text(self) -> str:
        """``needs 310 GPU-hours, limit 200; what fits: 3 of 5 seeds of every arm``."""
        least = "at least " if self.at_least else ""
        text = f"needs {least}{_number(self.needed)} {self.unit}, limit {_number(self.allowed)}"
        return f"{text}; what fits: {self.what_fits}" if self.what_fits else text


def passed_limits(
    forecast: SweepForecast,
    limits: Limits,
    *,
    used_gpu_hours: float = 0.0,
    used_judge_calls: int = 0,
) -> tuple[Passed, ...]:
    """The limits that what is left to do would pass.

    Parameters
    ----------
    used_gpu_hours, used_judge_calls
        What the sweep's stages have used already, in earlier versions of it.
    """
    found = []
    if limits.gpu_hours is not None:
        needed = used_gpu_hours + forecast.gpu_hours
        if needed > limits.gpu_hours:
            unknown = any(s.gpu_hours is None for s in forecast.stages)
            fits = _fitting(forecast.trials, limits.gpu_hours - used_gpu_hours, _hours)
            found.append(
                _passed("gpu_hours", "GPU-hours", limits.gpu_hours, needed, unknown, forecast, fits)
            )
    if limits.judge_calls is not None:
        calls = used_judge_calls + forecast.judge_calls
        if calls > limits.judge_calls:
            fits = _fitting(forecast.trials, limits.judge_calls - used_judge_calls, _calls)
            unknown = bool(forecast.unknown_calls)
            found.append(
                _passed(
                    "judge_calls", "judge calls", limits.judge_calls, calls, unknown, forecast, fits
                )
            )
    if limits.disk_gb is not None and forecast.disk_bytes is not None:
        gib = forecast.disk_bytes / GIB
        if gib > limits.disk_gb:
            found.append(Passed("disk_gb", "GiB", limits.disk_gb, gib, False, None, ""))
    return tuple(found)


def refuse_what_cannot_fit(passed: Sequence[Passed]) -> None:
    """Refuse a sweep that would pass a limit (see :func:`passed_limits`).

    Raises
    ------
    ConfigurationError
        Names each limit, what is needed, and what would fit.
    """
    if not passed:
        return
    ways = [f"raise limits.{p.field} to {_number(p.needed, up=True)}" for p in passed]
    if any(p.fits is not None for p in passed):
        ways.append("leave out seeds or arms")
    if any(p.field == "disk_gb" for p in passed):
        ways.append("lower limits.concurrency or `keep` of the stages")
    raise ConfigurationError(
        "The sweep " + "; it ".join(p.text for p in passed),
        expected="a sweep that fits into its limits",
        fix=", or ".join(ways) + ", and run the same command again",
    )


def _passed(
    field: str,
    unit: str,
    allowed: float,
    needed: float,
    unknown: bool,
    forecast: SweepForecast,
    fits: int,
) -> Passed:
    words = what_fits(forecast.trials, fits)
    return Passed(field, unit, float(allowed), float(needed), unknown, fits, words)


def _hours(trial: TrialShare) -> float:
    return trial.gpu_hours


def _calls(trial: TrialShare) -> float:
    return trial.judge_calls


def _fitting(trials: Sequence[TrialShare], room: float, cost: Callable[[TrialShare], float]) -> int:
    total, count = 0.0, 0
    for trial in trials:
        total += cost(trial)
        if total > room:
            break
        count += 1
    return count


def what_fits(trials: Sequence[TrialShare], count: int) -> str:
    """The first ``count`` trials in words: ``3 of 5 seeds of every arm, and 1 of 4 arms of the
    next``."""
    if count == 0:
        return "not one trial"
    seeds = list(dict.fromkeys(t.seed for t in trials))
    arms = len({t.arm for t in trials})
    left, whole = count, 0
    for seed in seeds:
        of_seed = sum(t.seed == seed for t in trials)
        if left < of_seed:
            break
        left -= of_seed
        whole += 1
    parts = []
    if whole:
        parts.append(f"{whole} of {len(seeds)} seeds of every arm")
    if left:
        parts.append(f"{left} of {arms} arms of {'the next seed' if whole else 'one seed'}")
    return ", and ".join(parts)


def _number(value: float, *, up: bool = False) -> str:
    """Three digits; ``up``: two, and never less than the value."""
    if value >= 100 or value == int(value):
        return f"{math.ceil(value) if up else value:.0f}"
    if not up:
        return f"{value:.3g}"
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / step) * step:.3g}"
