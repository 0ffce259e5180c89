"""Where two trainings part: the first step whose numbers or rollouts are not bitwise the same.

In: a pair of training stages. Out: a :class:`Divergence`. Rollouts of a step are sampled before its
numbers are logged, so that at one step a rollout that differs is the earlier of the two. What only
measures (times, speed, what the judge's server did) is left aside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.diffing.sides import Half, Pair
from infra.store.traces import list_rollouts, read_metrics, read_rollouts
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.proofs import MEASURED

_COMPARED = ("sample", *TRAINED)
#: In the order in which a rollout comes about.
_FIELDS = (
    *("prompt_index", "sample_id", "response_ids", "response_text", "logprobs", "finish_reason"),
    *("status", "judgements", "reward", "advantage"),
)
_FEW, _CUT = 6, 160


@dataclass(frozen=True)
class RolloutChange:
    """The first rollout of a step that differs: in which fields, and the first of them."""

    sample_id: str
    sample_index: int
    fields: tuple[str, ...]
    a: str
    b: str


@dataclass(frozen=True)
class Divergence:
    """How far two trainings are the same.

    Attributes
    ----------
    step
        The first that differs; None where none does, as far as both have gone.
    same_steps
        How many steps before that are bitwise the same.
    a_steps, b_steps
        The last step that each has logged.
    metrics
        At that step: name -> both values, those that differ.
    rollout
        The first rollout of that step that differs; None where none does, or none are kept.
    note
        What could not be compared.
    """

    stage: str
    step: int | None
    same_steps: int
    a_steps: int
    b_steps: int
    metrics: Mapping[str, tuple[Any, Any]]
    rollout: RolloutChange | None = None
    note: str = ""


def divergences(pairs: Sequence[Pair]) -> list[Divergence]:
    """Each pair of training stages of which both sides have logged something."""
    found = []
    for pair in pairs:
        if pair.kind not in _COMPARED or (both := pair.both) is None:
            continue
        if (one := _divergence(pair.name, *both)) is not None:
            found.append(one)
    return found


def _divergence(stage: str, a: Half, b: Half) -> Divergence | None:
    lines = [_lines(h.file("metrics")) for h in (a, b)]
    rollouts = [_rollout_files(h.file("rollouts")) for h in (a, b)]
    one, other = lines
    if not (one or rollouts[0]) or not (other or rollouts[1]):
        return None
    last = [max([*of, *kept], default=0) for of, kept in zip(lines, rollouts, strict=True)]
    steps = sorted({*one, *other, *rollouts[0], *rollouts[1]})
    same = 0
    for step in (s for s in steps if s <= min(last)):
        numbers = _numbers(one.get(step, []), other.get(step, []))
        rollout = _rollout(rollouts[0].get(step), rollouts[1].get(step))
        if numbers or rollout is not None:
            return Divergence(stage, step, same, last[0], last[1], numbers, rollout)
        same += 1
    note = ""
    if last[0] != last[1]:
        note = f"one has gone to step {last[0]}, the other to step {last[1]}"
    return Divergence(stage, None, same, last[0], last[1], {}, None, note)


def _lines(path: Path | None) -> dict[int, list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for line in read_metrics(path) if path is not None else ():
        found.setdefault(line.step, []).append(line.metrics)
    return found


def _numbers(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[Any, Any]]:
    one, other = _merged(a), _merged(b)
    names = [n for n in dict.fromkeys([*one, *other]) if not n.startswith(MEASURED)]
    return {n: (one.get(n), other.get(n)) for n in names if one.get(n) != other.get(n)}


def _merged(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for line in lines for name, value in line.items()}


def _rollout_files(folder: Path | None) -> dict[int, Path]:
    if folder is None:
        return {}
    return {int(p.stem.removeprefix("step-")): p for p in list_rollouts(folder)}


def _rollout(a: Path | None, b: Path | None) -> RolloutChange | None:
    """The first rollout that differs; where one side keeps none of the step, nothing is said."""
    if a is None or b is None or a.read_bytes() == b.read_bytes():
        return None
    one, other = read_rollouts(a), read_rollouts(b)
    for x, y in zip(one, other, strict=False):
        if fields := _differing(x, y):
            which = (str(x.get("sample_id")), int(x.get("sample_index") or 0))
            return RolloutChange(*which, fields, _cut(x.get(fields[0])), _cut(y.get(fields[0])))
    if len(one) != len(other):
        row = (one if len(one) > len(other) else other)[min(len(one), len(other))]
        which = (str(row.get("sample_id")), int(row.get("sample_index") or 0))
        return RolloutChange(*which, ("count",), str(len(one)), str(len(other)))
    return None


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    names = dict.fromkeys([*(f for f in _FIELDS if f in a or f in b), *a, *b])
    return tuple(name for name in names if a.get(name) != b.get(name))


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _CUT else f"{text[:_CUT]}…"
