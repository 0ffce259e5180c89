"""Two trainings that should be one: what differs, where first, and by how much.

In: metrics, rollouts, exported weights and final checkpoints of both. Out: a
:class:`~refiner_core.contract.proofs.Comparison` each. What only measures (times, speed, what a
judge's store knew) is left aside.

A difference of numbers is |a - b| / max(1, |a|, |b|): absolute below 1, relative above. One of
weights or optimiser states is the root mean square of a - b, for weights in units of the distance
that AdamW can have moved one (the sum of learning rates), else of the larger tensor's own: so the
same number means the same at any learning rate. Texts, counts, random states and
whatever is missing on one side have no size.

Checkpoints are read as what they are, files of tensors and JSON, whichever engine wrote them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from refiner_core.contract.proofs import MEASURED, Comparison

#: A row of metrics: its step, and the numbers by name.
Row = tuple[int, Mapping[str, float | None]]
#: What a judge has used is in a checkpoint's progress, and differs where a step was repeated.
_MEASURED_PROGRESS = ("judge",)
#: A rank's share of a checkpoint: what is in it goes by the same names on any number of ranks.
_SHARE = re.compile(r"-rank\d+-of-\d+")


class _Tally:
    """Counts what is compared under one name. ``moved`` is the unit of weights, where known."""

    def __init__(self, quantity: str, moved: float = 0.0) -> None:
        self.quantity, self._moved = quantity, moved
        self.compared = self.differing = 0
        self.largest: float | None = 0.0
        self.first_step: int | None = None
        self.first = ""

    def differs(self, what: str, size: float | None, step: int | None = None) -> None:
        self.compared += 1
        if not self.differing:
            self.first, self.first_step = what, step
        self.differing += 1
        unsized = size is None or not math.isfinite(size) or self.largest is None
        self.largest = None if unsized else max(self.largest or 0.0, size or 0.0)

    def compare(self, what: str, a: Any, b: Any, step: int | None = None) -> None:
        """Nested values, leaf by leaf."""
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            for key in dict.fromkeys((*a, *b)):
                name = f"{what}/{key}" if what else str(key)
                if key in a and key in b:
                    self.compare(name, a[key], b[key], step)
                else:
                    side = "straight" if key in a else "interrupted"
                    self.differs(f"{name}: {side} only", None, step)
        elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
            for place, (x, y) in enumerate(zip(a, b, strict=True)):
                self.compare(f"{what}[{place}]", x, y, step)
        elif _equal(a, b):
            self.compared += 1
        elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            size = self._distance(what, a, b)
            said = "another shape, type or count" if size is None else f"by {size:.3g}"
            self.differs(f"{what}, {said}", size, step)
        else:
            said = f"{what}: {_shown(a)} straight, {_shown(b)} interrupted"
            self.differs(said, _gap(a, b), step)

    def done(self) -> Comparison:
        return Comparison(
            *(self.quantity, self.compared, self.differing, self.largest),
            *(self.first_step, self.first),
        )

    def _distance(self, name: str, a: torch.Tensor, b: torch.Tensor) -> float | None:
        """Root mean square of a - b, of weights and masters in units of how far they moved, else
        of the larger one's own."""
        if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
            return None
        first, second = a.double(), b.double()
        unit = self._moved if name.startswith("model") or "/master." in name else 0.0
        unit = unit or max(float(t.square().mean().sqrt()) for t in (first, second)) or 1.0
        return float((first - second).square().mean().sqrt()) / unit


def _gap(a: Any, b: Any) -> float | None:
    """How far two plain values are apart. A count is another one, however near; only what is
    computed in floats may be near."""
    sized = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b))
    if not sized or not (isinstance(a, float) or isinstance(b, float)):
        return None
    return float(abs(a - b) / max(1.0, abs(a), abs(b)))


def _equal(a: Any, b: Any) -> bool:
    """Bitwise the same; NaN is NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return bool(torch.equal(a, b) or torch.equal(*bits))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def compare_traces(straight: Sequence[Row], interrupted: Sequence[Row]) -> Comparison:
    """Every metric of every step that does not only measure; rows in order, none missing and none
    twice."""
    tally = _Tally("loss trace")
    for ours, theirs in zip_longest(straight, interrupted):
        if ours is None or theirs is None or ours[0] != theirs[0]:
            step = min(row[0] for row in (ours, theirs) if row is not None)
            said = f"steps: {_step(ours)} straight, {_step(theirs)} interrupted"
            tally.differs(said, None, step)
            break
        a, b = (
            {name: value for name, value in row[1].items() if not name.startswith(MEASURED)}
            for row in (ours, theirs)
        )
        tally.compare("", a, b, ours[0])
    return tally.done()


def _step(row: Row | None) -> str:
    return "no more" if row is None else f"step {row[0]}"


def compare_rollouts(
    straight: Mapping[int, Sequence[Mapping[str, Any]]],
    interrupted: Mapping[int, Sequence[Mapping[str, Any]]],
) -> Comparison:
    """Every rollout of every step, column by column; a row counts once."""
    tally = _Tally("rollouts")
    for step in sorted({*straight, *interrupted}):
        ours, theirs = straight.get(step, ()), interrupted.get(step, ())
        if len(ours) != len(theirs):
            tally.differs(f"{len(ours)} straight, {len(theirs)} interrupted", None, step)
            continue
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            row = _Tally("")
            names = dict.fromkeys((*a, *b))
            x, y = ({name: one.get(name) for name in names} for one in (a, b))
            row.compare(f"rollout {place}", x, y)
            if row.differing:
                tally.differs(row.first, row.largest, step)
            else:
                tally.compared += 1
    return tally.done()


# ---------------------------------------------------------------- tensors


def compare_weights(straight: Path, interrupted: Path, moved: float) -> Comparison:
    """The safetensors files of two exported models.

    Parameters
    ----------
    moved
        The sum of learning rates over the steps: how far AdamW can have moved a weight. 0: it is
        not known, and each tensor's own size is the unit.
    """
    tally = _Tally("weights", moved)
    ours, theirs = (
        {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in _read(path)}
        for folder in (straight, interrupted)
    )
    tally.compare("model.safetensors", ours, theirs)
    return tally.done()


def compare_checkpoints(straight: Path, interrupted: Path, moved: float) -> list[Comparison]:
    """Two complete resume checkpoints of one step; ``moved`` as of :func:`compare_weights`."""
    ours, theirs = (_read_checkpoint(folder) for folder in (straight, interrupted))
    found = []
    for quantity, values in ours.items():
        tally = _Tally(quantity, moved)
        tally.compare("", values, theirs[quantity])
        found.append(tally.done())
    return found


def _read_checkpoint(folder: Path) -> dict[str, dict[str, Any]]:
    """A checkpoint's folder as values by name: what is plain, tensors, and random states."""
    plain: dict[str, Any] = {}
    state: dict[str, Any] = {}
    random: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == "COMPLETE.json":
            continue  # how it was written: attempt, seconds
        if path.suffix == ".json":
            value = json.loads(path.read_text(encoding="utf-8"))
            plain[name] = {k: v for k, v in value.items() if k not in _MEASURED_PROGRESS}
        elif path.suffix == ".safetensors":
            state.update((f"{name}/{key}", tensor) for key, tensor in _read(path))
        elif path.suffix == ".pt":
            random[name] = torch.load(path, map_location="cpu", weights_only=True)
        else:
            plain[name] = path.read_bytes().hex()
    return {"data cursor": plain, "optimiser": state, "random states": random}


def _read(path: Path) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(path).items())


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
