"""What engines do over several ranks, beside the gradients of a sharded model.

In: this rank's tensors and numbers. Out: sums, checks and files that all ranks agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from refiner_core.contract.errors import StageFailed
from refiner_core.training.model.tensors import model_tensors
from refiner_core.training.ranks import Ranks

#: Gradients that travel together (float32 elements): 256 MiB.
BUCKET_ELEMENTS = 1 << 26
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_over_ranks(
    gradients: Sequence[torch.Tensor | None],
    shapes: Sequence[torch.Size],
    ranks: Ranks,
    device: Any,
) -> list[torch.Tensor | None]:
    """Sums of float32 gradients over all ranks, bitwise the same on each.

    A parameter without a gradient on one rank counts as 0 there; one without any has none after.
    """
    import torch.distributed as dist

    known = ranks.add([gradient is not None for gradient in gradients])
    full = [
        (torch.zeros(shape, device=device) if gradient is None else gradient) if count else None
        for gradient, shape, count in zip(gradients, shapes, known, strict=True)
    ]
    for bucket in _buckets([gradient for gradient in full if gradient is not None]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        for gradient, total in zip(
            bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True
        ):
            gradient.copy_(total.view_as(gradient))
    return full


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def require_equal_weights(model: Any, ranks: Ranks) -> None:
    """Fail where two ranks do not hold bitwise the same weights.

    Raises
    ------
    StageFailed
        On every rank: something is wrong with a machine or a library, and a checkpoint of it would
        hold the weights of one rank only.
    """
    if ranks.world == 1:
        return
    gathered = ranks.gather(_fingerprint(model))
    differs = None
    if gathered is not None:
        odd = [rank for rank, value in enumerate(gathered) if value != gathered[0]]
        differs = odd or None
    if (odd_ranks := ranks.broadcast(differs)) is not None:
        raise StageFailed(
            f"The weights of rank {odd_ranks[0]} are not those of rank 0, though both made the "
            "same updates",
            expected="bitwise equal weights on all ranks",
            fix="run it again from the last checkpoint, without the node of that rank; if it "
            "happens again, please report it",
        )


def _fingerprint(model: Any) -> int:
    """The same for the same bits (and hardly ever for others): sums of the bits as integers."""
    sums = [
        tensor.contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)
        for tensor in model_tensors(model).values()
    ]
    return hash(tuple(torch.stack(sums).tolist()))


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """A model in evaluation mode: while it trains with activation checkpointing, transformers keeps
    no cache, and what it generates is wrong."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def on_first_rank(ranks: Ranks, act: Callable[[], None]) -> None:
    """Do something on rank 0; the others wait, and share its error."""
    error: BaseException | None = None
    if ranks.rank == 0:
        try:
            act()
        except BaseException as raised:
            error = raised
    ranks.all_or_none(error)


def most_of_all(ranks: Ranks, values: Mapping[str, float]) -> dict[str, float]:
    """The largest value of each name over all ranks."""
    gathered = ranks.gather(dict(values))
    if gathered is None:
        return ranks.broadcast(None)
    return ranks.broadcast({name: max(v[name] for v in gathered) for name in values})
