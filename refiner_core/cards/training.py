"""Course and cost of a training: its curve, machine, time, GPU-hours, money, what was certified.

In: reports, provenance, cost and certificate of :class:`CardFacts`. Out: a short table with a line
of blocks, and lines of the section "Hardware and cost".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from refiner_core.cards.facts import MISSING, CardFacts, counted, finite, number, quoted
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.proofs import Certificate

TABLE_POINTS = 10
SPARK_POINTS = 40
_BLOCKS = "▁▂▃▄▅▆▇█"
#: Curves of a stage's report (dotted path in it), as a card names them. The first is drawn.
_CURVES: dict[str, tuple[tuple[str, str], ...]] = {
    "grpo": (
        ("curves.scores", "reward"),
        ("curves.objective/kl3_avg", "KL"),
        ("curves.val/sequence_lengths", "tokens per rollout"),
        ("curves.val/stop_rate", "share that stopped"),
    ),
    "sft": (("train_loss.curve", "training loss"),),
}
#: The same of an agent, whose rollouts hold what tools and users said as well.
_CURVES_OF_EPISODES = (
    ("curves.scores", "reward"),
    ("curves.objective/kl3_avg", "KL"),
    ("curves.episodes/success", "share solved"),
    ("curves.episodes/turns", "turns"),
    ("curves.val/sequence_lengths", "tokens per episode, with those of tools and user"),
)


class TrainingCurve(NamedTuple):
    """A table of a run's course, its sparkline, and what is to be said with them."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class _Curve:
    """One curve: the fact that it is, what a card calls it, its steps and values."""

    fact: str
    name: str
    steps: Sequence[Any]
    values: Sequence[float | None]

    def step(self, index: int) -> str:
        return number(self.steps[index], f"{self.fact}.{index}.0")

    def value(self, index: int) -> str:
        value = self.values[index]
        return MISSING if value is None else number(f"{value:.4g}", f"{self.fact}.{index}.1")


def training_curve(facts: CardFacts) -> TrainingCurve | None:
    """The course of this model's own training; None where no point is recorded."""
    names = _CURVES.get(facts.stage, _CURVES["sft"])
    if facts.stage == "grpo" and facts.is_agent:
        names = _CURVES_OF_EPISODES
    found = []
    for path, name in names:
        fact = f"reports.{facts.stage}.{path}"
        points = facts.fact(fact)
        if points and isinstance(points, list | tuple):
            values = [finite(point[1]) for point in points]
            found.append(_Curve(fact, name, [point[0] for point in points], values))
    if not found:
        return None
    main, *others = found
    beside = [main, *(curve for curve in others if curve.steps == main.steps)]
    return TrainingCurve(
        header=("step", *(curve.name for curve in beside)),
        rows=tuple(
            (main.step(i), *(curve.value(i) for curve in beside))
            for i in _spread(len(main.steps), TABLE_POINTS)
        ),
        lines=(
            _sparkline(main),
            *(
                f"{curve.name[:1].upper()}{curve.name[1:]} was not computed in all steps; the "
                f"first value is {curve.value(0)}, the last {curve.value(len(curve.steps) - 1)}."
                for curve in others
                if curve not in beside
            ),
            *_validation(facts),
        ),
    )


def _spread(length: int, most: int) -> list[int]:
    """At most ``most`` indices, evenly spread, with the first and the last."""
    if length <= most:
        return list(range(length))
    return [round(i * (length - 1) / (most - 1)) for i in range(most)]


def _sparkline(curve: _Curve) -> str:
    known = [(value, index) for index, value in enumerate(curve.values) if value is not None]
    if not known:
        return f"The {curve.name} was never a finite number."
    (low, first), (high, last) = min(known), max(known)
    shown = [curve.values[i] for i in _spread(len(curve.values), SPARK_POINTS)]
    blocks = "".join(_block(value, low, high) for value in shown)
    return (
        f"{curve.name.capitalize()} from step {curve.step(0)} to "
        f"{curve.step(len(curve.steps) - 1)}: `{blocks}` (lowest {curve.value(first)}, highest "
        f"{curve.value(last)})."
    )


def _block(value: float | None, low: float, high: float) -> str:
    if value is None:
        return " "
    share = (value - low) / (high - low) if high > low else 0.0
    return _BLOCKS[min(len(_BLOCKS) - 1, int(share * len(_BLOCKS)))]


def _validation(facts: CardFacts) -> Iterator[str]:
    path = f"reports.{facts.stage}.validation_loss"
    facts_of = {key: f"{path}.{key}" for key in ("final", "best", "best_step")}
    known = {key: finite(facts.fact(fact)) for key, fact in facts_of.items()}
    if None not in known.values():
        final, best, step = (number(f"{known[k]:.4g}", fact) for k, fact in facts_of.items())
        yield f"Validation loss: {final} at the end, lowest {best} after step {step}."


# ---------------------------------------------------------------- cost


def cost_lines(facts: CardFacts) -> Iterator[str]:
    """Machine, time per stage, and what all attempts together took."""
    if host := facts.provenance.get("host"):
        yield f"**Machine:** {quoted(host, 'provenance.host')}"
    durations, spent = facts.provenance.get("durations"), facts.cost.get("seconds")
    made, all_of_them = (
        ", ".join(f"{stage} {number(text, f'{path}.{stage}')}" for stage, text in known)
        for path, known in (
            ("provenance.durations", _times(durations)),
            ("cost.seconds", _times(spent)),
        )
    )
    if made:
        yield f"**Time of the attempts that made it:** {made}."
    if all_of_them and _times(spent) != _times(durations):
        yield f"**Time of all attempts:** {all_of_them}."
    if unit := _unit(facts):
        yield (
            f"**Compute:** {_hours(facts, unit)}{_UNITS[unit]}, all attempts together."
            f"{_price(facts)}"
        )
    yield from _judged(facts)


def _judged(facts: CardFacts) -> Iterator[str]:
    """Judgements in the steps that led here; nothing where it keeps no count."""
    path = "reports.grpo.judge"
    used = facts.fact(path)
    if not isinstance(used, Mapping) or not finite(used.get("asked")):
        return
    words = [("asked", "judgement", "judgements"), ("calls", "call", "calls")]
    words += [(key, text, text) for key, text in _ABOUT_JUDGING.items() if used.get(key)]
    if used.get("prompt_tokens"):
        words.append(("prompt_tokens", "token read", "tokens read"))
        words.append(("completion_tokens", "written", "written"))
    parts = (counted(used.get(key, 0), f"{path}.{key}", *said) for key, *said in words)
    yield f"**Judging in training:** {', '.join(parts)}."


_ABOUT_JUDGING = {
    "stored": "known before",
    "shared": "asked for another answer as well",
    "failed": "without a score",
}
_UNITS = {"gpu_hours": " GPU-hours", "core_hours": " core-hours"}


def lost_hours(facts: CardFacts) -> Iterator[str]:
    """A note of what went into work that was done again; none for nothing."""
    unit = _unit(facts)
    if unit is not None and finite(facts.cost.get(f"lost_{unit}")):
        yield (
            f"{_hours(facts, f'lost_{unit}')} of {_hours(facts, unit)}{_UNITS[unit]} went into "
            "work that had to be done again."
        )


def _unit(facts: CardFacts) -> str | None:
    """The unit that a run is counted in: ``gpu_hours``, or ``core_hours`` without GPUs."""
    return next((unit for unit in _UNITS if finite(facts.cost.get(unit))), None)


def _hours(facts: CardFacts, key: str) -> str:
    return number(_amount(finite(facts.cost.get(key)) or 0.0), f"cost.{key}")


def _amount(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def _price(facts: CardFacts) -> str:
    """The price of all GPU-hours, by the price of one."""
    price, hours = finite(facts.cost.get("price")), finite(facts.cost.get("gpu_hours"))
    if price is None or not hours:
        return ""
    currency = str(facts.cost.get("currency") or "")
    return (
        f" That is about {number(_amount(price * hours), 'cost.gpu_hours')} {currency} at "
        f"{number(_amount(price), 'cost.price')} {currency} per GPU-hour."
    )


def _times(seconds: Any) -> list[tuple[str, str]]:
    """Stages with how long they took, in the order of work."""
    if not isinstance(seconds, Mapping):
        return []
    known = [stage for stage in seconds if finite(seconds[stage]) is not None]
    place = {name: kind.order for name, kind in KINDS.items()}
    known.sort(key=lambda stage: (place.get(stage, sys.maxsize), stage))
    return [(stage, duration(seconds[stage])) for stage in known]


def duration(seconds: float) -> str:
    """``2 h 02 min``, ``3 min 05 s``, ``4.1 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def public_certificate(
    certificates: list[Certificate], trained_on: Mapping[str, Any]
) -> dict[str, Any]:
    """The newest certificate of the kind of machine that a training ran on, without its name.

    Parameters
    ----------
    certificates
        Those of a workspace, oldest first.
    trained_on
        Provenance of the training stage: its ``host`` and ``versions``.

    Returns
    -------
    dict
        ``made_at`` (day), ``gpus`` (how many), ``gpu`` (name), ``passed``, ``failed``, ``absent``;
        empty where no certificate is of the same processor, GPUs and torch, or it did not pass.
    """
    host, torch = trained_on.get("host") or {}, (trained_on.get("versions") or {}).get("torch")
    same = [
        made
        for made in certificates
        if made.passed
        and made.host.get("cpu") == host.get("cpu")
        and list(made.host.get("gpus") or ()) == list(host.get("gpus") or ())
        and made.versions.get("torch") == torch
    ]
    if not same:
        return {}
    made = same[-1]
    return {
        "made_at": made.made_at[:10],
        "gpus": len(made.gpus),
        "gpu": made.gpus[0] if made.gpus else "",
        "passed": made.count("pass"),
        "failed": made.count("fail"),
        "absent": made.count("absent"),
    }


def hardware_notes(facts: CardFacts) -> Iterator[str]:
    """One note where such hardware was certified, none where not."""
    known, at = facts.certificate, "certificate"
    if known:
        gpus = f" ({facts.number(f'{at}.gpus')} x {quoted(known['gpu'], f'{at}.gpu')})"
        yield (
            "The hardware that it was trained on was certified by `refiner certify` on "
            f"{quoted(known['made_at'], f'{at}.made_at')}{gpus if known['gpus'] else ''}: "
            f"{facts.counted(f'{at}.passed', 'check')} passed, {facts.number(f'{at}.failed')} "
            f"failed, and {facts.number(f'{at}.absent')} could not be made there."
        )
