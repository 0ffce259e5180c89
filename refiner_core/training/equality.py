"""Comparison of two trainings that should be equal: the differences, the first one, their size.

In: metrics, rollouts, exported weights and final checkpoints of both. Out: a
:class:`~refiner_core.contract.proofs.ProofComparison` each. Pure measurements (times, speed, cache
hits of a judge) are ignored.

A difference of numbers is |a - b| / max(1, |a|, |b|): absolute below 1, relative above. For
weights and optimiser states it is the root mean square of a - b; for weights in units of the
distance that AdamW can have moved one (the sum of learning rates), else of the larger tensor's own:
the same number means the same at any learning rate. Differences of texts, counts, random states and
values missing on one side have no size.

Checkpoints are read as plain files of tensors and JSON, for any engine.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from refiner_core.contract.proofs import MEASURED, ProofComparison

#: A row of metrics: its step, and the numbers by name.
Row = tuple[int, Mapping[str, float | None]]
#: The judge's usage is part of a checkpoint's progress, and differs if a step was repeated.
_MEASURED_PROGRESS = ("judge",)
#: A rank's share of a checkpoint: its values have the same names for any number of ranks.
_SHARE = re.compile(r"-rank\d+-of-\d+")


_END = math.inf
#: Values of one side by position: their step, or the end, and name.
_Values = Mapping[tuple[float, str], Any]
_MISSING = object()


def _leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested values, with their names."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{at}/{key}" if at else str(key))
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from _leaves(part, f"{at}[{place}]")
    else:
        yield at, value


def _compared(
    quantity: str, straight: _Values, interrupted: _Values, moved: float = 0.0
) -> ProofComparison:
    """Compare values one by one. ``moved`` is the unit for weights, if known."""
    differences = []
    keys = {**straight, **interrupted}
    for step, name in keys:
        a, b = (side.get((step, name), _MISSING) for side in (straight, interrupted))
        if not _equal(a, b):
            differences.append((step, name, a, b))
    if not differences:
        return ProofComparison(quantity, len(keys))
    gaps = [_gap(name, a, b, moved) for _, name, a, b in differences]
    sizes = [gap for gap in gaps if gap is not None and math.isfinite(gap)]
    step, name, a, b = min(differences, key=lambda difference: difference[0])
    said = f"{name}: {_shown(a)} straight, {_shown(b)} interrupted"
    return ProofComparison(
        *(quantity, len(keys), len(differences)),
        max(sizes) if len(sizes) == len(gaps) else None,
        *(None if step == _END else int(step), said),
    )


def _gap(name: str, a: Any, b: Any, moved: float) -> float | None:
    """Distance of two values; None if it has no size. Counts must be equal; only floats may be
    near. Tensors: root mean square of a - b, for weights and masters in units of the distance
    moved, else of the larger one's own."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
            return None
        first, second = a.double(), b.double()
        unit = moved if name.startswith("model") or "/master." in name else 0.0
        unit = unit or max(float(t.square().mean().sqrt()) for t in (first, second)) or 1.0
        return float((first - second).square().mean().sqrt()) / unit
    sized = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b))
    if not sized or not (isinstance(a, float) or isinstance(b, float)):
        return None
    return float(abs(a - b) / max(1.0, abs(a), abs(b)))


def _equal(a: Any, b: Any) -> bool:
    """Bitwise equality; NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return bool(torch.equal(a, b) or torch.equal(*bits))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def compare_traces(straight: Sequence[Row], interrupted: Sequence[Row]) -> ProofComparison:
    """Compare every metric of every step except measurements; none missing and none twice."""

    def by_step(rows: Sequence[Row]) -> _Values:
        steps: dict[int, list[Mapping[str, float | None]]] = defaultdict(list)
        for step, numbers in rows:
            steps[step].append({n: v for n, v in numbers.items() if not n.startswith(MEASURED)})
        return _by_step(steps)

    return _compared("loss trace", by_step(straight), by_step(interrupted))


def compare_rollouts(
    straight: Mapping[int, Sequence[Mapping[str, Any]]],
    interrupted: Mapping[int, Sequence[Mapping[str, Any]]],
) -> ProofComparison:
    """Compare every value of every rollout of every step; a missing column counts as None."""
    return _compared("rollouts", _by_step(straight), _by_step(interrupted))


def _by_step(steps: Mapping[int, Sequence[Mapping[str, Any]]]) -> _Values:
    return {
        (step, name): value
        for step, rows in steps.items()
        for name, value in _leaves(list(rows), "row")
    }


# ---------------------------------------------------------------- tensors


def compare_weights(straight: Path, interrupted: Path, moved: float) -> ProofComparison:
    """Compare the safetensors files of two exported models.

    Parameters
    ----------
    moved
        The sum of learning rates over the steps: how far AdamW can have moved a weight. 0:
        unknown; each tensor's own size is the unit.
    """
    ours, theirs = (
        {
            (_END, f"model/{name}"): tensor
            for path in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        for folder in (straight, interrupted)
    )
    return _compared("weights", ours, theirs, moved)


def compare_checkpoints(straight: Path, interrupted: Path, moved: float) -> list[ProofComparison]:
    """Compare two complete resume checkpoints of one step; ``moved``: see
    :func:`compare_weights`."""
    ours, theirs = (_read_checkpoint(folder) for folder in (straight, interrupted))
    found = []
    for quantity in ours:
        a, b = ({(_END, n): v for n, v in _leaves(side[quantity])} for side in (ours, theirs))
        found.append(_compared(quantity, a, b, moved))
    return found


def _read_checkpoint(folder: Path) -> dict[str, dict[str, Any]]:
    """A checkpoint's folder as values by name: plain values, tensors, and random states."""
    plain: dict[str, Any] = {}
    state: dict[str, Any] = {}
    random: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == "COMPLETE.json":
            continue  # facts of the writing: attempt, seconds
        if path.suffix == ".json":
            value = json.loads(path.read_text(encoding="utf-8"))
            plain[name] = {k: v for k, v in value.items() if k not in _MEASURED_PROGRESS}
        elif path.suffix == ".safetensors":
            state.update((f"{name}/{key}", tensor) for key, tensor in load_file(path).items())
        elif path.suffix == ".pt":
            random[name] = torch.load(path, map_location="cpu", weights_only=True)
        else:
            plain[name] = path.read_bytes().hex()
    return {"data cursor": plain, "optimiser": state, "random states": random}


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    text = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
