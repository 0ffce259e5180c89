"""Plain torch: every rank holds the model and its optimisers, and gradients are summed.

In: a loaded model, its updater, and the ranks that train together. Out: an
:class:`~refiner_core.training.engines.protocol.Engine`.

This is also what ZeRO-0 means, which shares nothing out: the gradients of a step are added up over
its packs in float32 on each rank, then once over the ranks, and every rank makes the same update.
Weights stay bitwise equal on all ranks; a snapshot and an export check that they did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from refiner_core.contract.config import ModelConfig
from refiner_core.contract.errors import StageFailed
from refiner_core.training.batches import Batch
from refiner_core.training.model import loading
from refiner_core.training.model.loading import model_tensors
from refiner_core.training.model.logprobs import Entropy, TokenScores, token_scores
from refiner_core.training.model.optim import Updater
from refiner_core.training.ranks import OneRank, Ranks
from refiner_core.training.state import checkpoint
from refiner_core.training.state.checkpoint import HostCopies

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


class PlainEngine:
    """Torch's own optimisers, in one process or data-parallel in several."""

    def __init__(
        self,
        loaded: loading.Loaded,
        updater: Updater,
        config: ModelConfig,
        ranks: Ranks | None = None,
    ) -> None:
        self.loaded, self.updater, self._config = loaded, updater, config
        self.ranks: Ranks = ranks or OneRank()
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.share_prompts, self.balance = loaded.share_prompts, loaded.balance
        self._state = checkpoint.ReplicatedState(self.model, updater)
        self._copies = HostCopies()
        self._summed = False

    @property
    def device(self) -> Any:
        """Where the model is."""
        return self.loaded.device

    @property
    def pad_id(self) -> int:
        """What padding is made of."""
        return self.loaded.pad_id

    def score(
        self, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "off"
    ) -> TokenScores:
        """Log-probabilities of the batch's targets."""
        return token_scores(self.model, batch, temperature=temperature, entropy=entropy)

    def backward(self, loss: Any) -> None:
        """Add the gradients of a loss."""
        if self._summed:
            raise RuntimeError("gradients were summed over the ranks already; step or drop first")
        self.updater.forget_norm()
        loss.backward()

    def step(self, factor: float) -> float:
        """Update, clear the gradients, and return their norm before clipping."""
        self._sum()
        self._summed = False
        return self.updater.step(factor)

    def gradient_norm(self) -> float:
        """The norm of the gradients; no more can be added to them."""
        self._sum()
        return self.updater.gradient_norm()

    def drop(self) -> None:
        """Clear the gradients."""
        self._summed = False
        self.updater.drop()

    def reference(self, model_ref: str) -> FrozenModel:
        """Another copy of a model, frozen."""
        return FrozenModel(loading.load_model(model_ref, self._config, self.device))

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """The model, which is always whole here, in evaluation mode."""
        with evaluating(self.model):
            yield self.model

    def snapshot(self, progress: Mapping[str, Any]) -> checkpoint.StateSnapshot:
        """The state as of now."""
        require_equal_weights(self.model, self.ranks)
        return checkpoint.take_snapshot(self._state, progress, self.ranks, self._copies)

    def restore(self, folder: Path) -> dict[str, Any]:
        """Put a saved state back; returns its progress."""
        self.drop()
        return checkpoint.restore_state(folder, self._state, self.ranks)

    def export(self, folder: Path) -> None:
        """Write model and tokenizer."""
        require_equal_weights(self.model, self.ranks)
        on_first_rank(self.ranks, lambda: loading.export(self.model, self.tokenizer, folder))

    def memory(self) -> dict[str, float]:
        """The most memory that a rank has taken so far."""
        return most_of_all(self.ranks, loading.memory_metrics(self.device))

    def _sum(self) -> None:
        """Once per step: this rank's gradients become those of all."""
        if self._summed or self.ranks.world == 1:
            return
        gradients = self.updater.gradients()
        summed = sum_over_ranks(gradients, self.updater.shapes, self.ranks, self.device)
        self.updater.set_gradients(summed)
        self._summed = True


class FrozenModel:
    """A model that only scores."""

    def __init__(self, model: Any) -> None:
        self.model = model.requires_grad_(False)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def score(self, batch: Batch, *, temperature: float = 1.0) -> TokenScores:
        """Log-probabilities of the batch's targets."""
        return token_scores(self.model, batch, temperature=temperature)
