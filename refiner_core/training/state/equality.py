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

import hashlib
import json
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from refiner_core.contract.proofs import MEASURED, Comparison

#: A row of metrics: its step, and the numbers by name.
Row = tuple[int, Mapping[str, float | None]]
#: What a judge has used is in a checkpoint's progress, and differs where a step was repeated.
_MEASURED_PROGRESS = ("judge",)
#: Who wrote a checkpoint, and from whose it went on: others, on another number of ranks.
_WRITERS = ("written_by", "restored_from")
#: A rank's share of a checkpoint: what is in it goes by the same names on any number of ranks.
_SHARE = re.compile(r"-rank\d+-of-\d+")
_RANDOM = re.compile(r"(.*/)?rng\b")


class _Tally:
    """Counts what is compared under one name."""

    def __init__(self, quantity: str) -> None:
        self.quantity, self.compared, self.differing = quantity, 0, 0
        self.largest: float | None = 0.0
        self.first_step: int | None = None
        self.first = ""

    def same(self, count: int = 1) -> None:
        self.compared += count

    def differs(self, what: str, size: float | None, step: int | None = None) -> None:
        self.compared += 1
        if not self.differing:
            self.first, self.first_step = what, step
        self.differing += 1
        unsized = size is None or not math.isfinite(size) or self.largest is None
        self.largest = None if unsized else max(self.largest or 0.0, size or 0.0)

    def numbers(self, what: str, a: Any, b: Any, step: int | None = None) -> None:
        """Two plain values: the same, numbers that differ by so much, or others."""
        if type(a) is type(b) and (a == b or (a != a and b != b)):
            self.same()
            return
        sized = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b))
        said = f"{what}: {_shown(a)} straight, {_shown(b)} interrupted"
        # A count is another one, however near; only what is computed in floats may be near.
        near = sized and (isinstance(a, float) or isinstance(b, float))
        self.differs(said, abs(a - b) / max(1.0, abs(a), abs(b)) if near else None, step)

    def done(self) -> Comparison:
        return Comparison(
            *(self.quantity, self.compared, self.differing, self.largest),
            *(self.first_step, self.first),
        )


def compare_traces(straight: Sequence[Row], interrupted: Sequence[Row]) -> Comparison:
    """Every metric of every step that does not only measure; rows in order, none missing and none
    twice."""
    tally = _Tally("loss trace")
    for i in range(max(len(straight), len(interrupted))):
        ours = straight[i] if i < len(straight) else None
        theirs = interrupted[i] if i < len(interrupted) else None
        if ours is None or theirs is None or ours[0] != theirs[0]:
            step = min(row[0] for row in (ours, theirs) if row is not None)
            said = f"steps: {_step(ours)} straight, {_step(theirs)} interrupted"
            tally.differs(said, None, step)
            break
        step = ours[0]
        names = [n for n in dict.fromkeys((*ours[1], *theirs[1])) if not n.startswith(MEASURED)]
        for name in names:
            if (name in ours[1]) != (name in theirs[1]):
                side = "straight" if name in ours[1] else "interrupted"
                tally.differs(f"{name}: {side} only", None, step)
            else:
                tally.numbers(name, ours[1][name], theirs[1][name], step)
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
            _row(tally, f"rollout {place}", a, b, step)
    return tally.done()


def _row(tally: _Tally, what: str, a: Mapping[str, Any], b: Mapping[str, Any], step: int) -> None:
    part = _Tally("")
    for name in dict.fromkeys((*a, *b)):
        _values(part, f"{what}, {name}", a.get(name), b.get(name), step)
    if part.differing:
        tally.differs(part.first, part.largest, step)
    else:
        tally.same()


def _values(tally: _Tally, what: str, a: Any, b: Any, step: int | None) -> None:
    """Nested plain values, leaf by leaf."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys((*a, *b)):
            if (key in a) != (key in b):
                side = "straight" if key in a else "interrupted"
                tally.differs(f"{what}/{key}: {side} only", None, step)
            else:
                _values(tally, f"{what}/{key}", a[key], b[key], step)
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for place, (x, y) in enumerate(zip(a, b, strict=True)):
            _values(tally, f"{what}[{place}]", x, y, step)
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        tally.differs(f"{what}: {len(a)} straight, {len(b)} interrupted", None, step)
    else:
        tally.numbers(what, a, b, step)


# ---------------------------------------------------------------- tensors


def compare_weights(straight: Path, interrupted: Path, moved: float) -> Comparison:
    """The safetensors files of two exported models.

    Parameters
    ----------
    moved
        The sum of learning rates over the steps: how far AdamW can have moved a weight. 0: it is
        not known, and each tensor's own size is the unit.
    """
    tally = _Tally("weights")
    ours, theirs = dict(_safetensors(straight)), dict(_safetensors(interrupted))
    _tensors(tally, ours, theirs, moved)
    return tally.done()


def compare_checkpoints(
    straight: Path, interrupted: Path, moved: float, *, same_layout: bool
) -> list[Comparison]:
    """Two complete resume checkpoints of one step.

    Parameters
    ----------
    moved
        See :func:`compare_weights`.
    same_layout
        Both are of as many processes. If not, each has random states of its own, which are not
        compared.
    """
    left_out = _MEASURED_PROGRESS if same_layout else (*_MEASURED_PROGRESS, *_WRITERS)
    ours, theirs = (_Checkpoint(folder, left_out) for folder in (straight, interrupted))
    cursor, optimiser, random = (
        _Tally(name) for name in ("data cursor", "optimiser", "random states")
    )
    for name in dict.fromkeys((*ours.plain, *theirs.plain)):
        if name in ours.plain and name in theirs.plain:
            _values(cursor, name, ours.plain[name], theirs.plain[name], None)
        elif same_layout:
            cursor.differs(f"{name}: {'straight' if name in ours.plain else 'interrupted'} only",
                           None)  # fmt: skip
    _tensors(optimiser, ours.state, theirs.state, moved)
    if not same_layout:
        return [cursor.done(), optimiser.done()]
    for name in dict.fromkeys((*ours.random, *theirs.random)):
        if _equal(ours.random.get(name), theirs.random.get(name)):
            random.same()
        else:
            random.differs(name, None)
    return [cursor.done(), optimiser.done(), random.done()]


class _Checkpoint:
    """A checkpoint's folder as values by name: what is plain, tensors, and random states."""

    def __init__(self, folder: Path, left_out: Sequence[str]) -> None:
        self.plain: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.random: dict[str, Any] = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            whole = path.relative_to(folder).as_posix()
            if whole == "COMPLETE.json":
                continue  # how it was written: attempt, seconds
            random = bool(_RANDOM.match(whole))
            name = whole if random else _SHARE.sub("", whole)
            if path.suffix == ".json":
                value = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(value, dict):
                    value = {k: v for k, v in value.items() if k not in left_out}
                self.plain[name] = value
            elif path.suffix == ".safetensors":
                self.state.update((f"{name}/{k}", v) for k, v in _read_safetensors(path))
            elif path.suffix in (".pt", ".pth", ".bin"):
                self._take(path, name)
            else:
                self.plain[name] = path.read_bytes().hex()

    def _take(self, path: Path, name: str) -> None:
        import torch

        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # an engine's own classes: the same bytes or not
            with path.open("rb") as file:
                saved = {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        for key, value in _leaves(saved, name):
            part = self.random if _RANDOM.match(key) else self.state
            part[key] = value


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        yield f"{name}/#", len(value)
        for place, item in enumerate(value):
            yield from _leaves(item, f"{name}/{place}")
    else:
        yield name, value


def _tensors(
    tally: _Tally, ours: Mapping[str, Any], theirs: Mapping[str, Any], moved: float
) -> None:
    import torch

    for name in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(name), theirs.get(name)
        if name not in ours or name not in theirs:
            tally.differs(f"{name}: {'straight' if name in ours else 'interrupted'} only", None)
        elif _equal(a, b):
            tally.same()
        elif not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            tally.numbers(name, a, b)
        elif a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
            tally.differs(f"{name}: tensors of another shape, type or count", None)
        else:
            size = _distance(a, b, moved if _is_weight(name) else 0.0)
            tally.differs(f"{name}, by {size:.3g}", size)


def _is_weight(name: str) -> bool:
    """True if a tensor is a weight or its master copy, and no state of an optimiser."""
    return name.startswith("model") or "/master." in name


def _distance(a: Any, b: Any, moved: float) -> float:
    """Root mean square of a - b, in units of ``moved``, or of the larger one's own."""
    first, second = a.double(), b.double()
    unit = moved or max(float(t.square().mean().sqrt()) for t in (first, second)) or 1.0
    return float((first - second).square().mean().sqrt()) / unit


def _equal(a: Any, b: Any) -> bool:
    """Bitwise the same; NaN is NaN."""
    import torch

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype
        return bool(same and (torch.equal(a, b) or _bits(a) == _bits(b)))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _bits(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _safetensors(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.glob("*.safetensors")):
        yield from ((f"model.safetensors/{k}", v) for k, v in _read_safetensors(path))


def _read_safetensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Tensor by tensor: two large models do not have to be in memory at once twice."""
    import safetensors

    with safetensors.safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            yield name, file.get_tensor(name)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
