"""Engines: what a training loop may ask of whatever moves the weights.

In: batches and losses of *this rank's* share. Out: gradients summed over all ranks, one update, and
state that can be written and read back.

How a loop uses it, on every rank alike:

    for batch in my_batches:                # equally many on every rank, neutral ones included
        scores = engine.score(batch, temperature=..., entropy="metric")
        engine.backward(loss_of(scores))    # this rank's part of one sum over all ranks
    norm = engine.step(factor)              # or engine.drop() to make no update

The loss is a *sum* over ranks (its weights are fixed before the first pack), not a mean of means:
results do not depend on how samples fell onto ranks, but for the order of sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from refiner_core.contract.config import ModelConfig
from refiner_core.contract.errors import StageFailed
from refiner_core.training.batches import Batch
from refiner_core.training.model import loading
from refiner_core.training.model.loading import model_tensors
from refiner_core.training.model.logprobs import Entropy, TokenScores, token_scores
from refiner_core.training.ranks import Ranks, on_first
from refiner_core.training.state import checkpoint


class Engine(ABC):
    """A model in training. Every method is called by all ranks together, but where it says not.

    ``model`` is the transformers model, whose weights are there inside :meth:`whole` only;
    ``device`` is where batches must lie; ``share_prompts`` and ``balance`` are what
    :mod:`refiner_core.training.batches` calls so; padding is made of ``pad_id``.
    """

    def __init__(
        self,
        loaded: loading.Loaded,
        device: Any,
        state: checkpoint.ReplicatedState,
        config: ModelConfig,
        ranks: Ranks,
    ) -> None:
        self.model, self.tokenizer, self.device = loaded.model, loaded.tokenizer, device
        self.share_prompts, self.balance = loaded.share_prompts, loaded.balance
        self.pad_id, self.ranks = loaded.pad_id, ranks
        self._state, self._config = state, config
        self._copies = checkpoint.HostCopies()

    @abstractmethod
    def score(
        self, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "off"
    ) -> TokenScores:
        """Log-probabilities of this rank's batch, with gradients where torch records them."""

    @abstractmethod
    def backward(self, loss: Any) -> None:
        """Add the gradients of this rank's part of the loss."""

    @abstractmethod
    def step(self, factor: float) -> float:
        """Update with the gradients of all ranks at ``factor`` times the peak rates; clear them.

        Returns the global gradient norm before clipping; one that is not finite changes nothing.
        """

    @abstractmethod
    def gradient_norm(self) -> float:
        """The global norm that the next :meth:`step` would report; gradients stay, and none can be
        added any more."""

    @abstractmethod
    def drop(self) -> None:
        """Clear the gradients without an update."""

    @abstractmethod
    def whole(self) -> AbstractContextManager[Any]:
        """The model with all its weights and in evaluation mode, to read (generate, export, send to
        servers)."""

    def reference(self, model_ref: str) -> FrozenModel:
        """A frozen model beside it, for the KL term, whole on every rank's device."""
        return FrozenModel(loading.load_model(model_ref, self._config, self.device))

    def snapshot(self, progress: Mapping[str, Any]) -> checkpoint.StateSnapshot:
        """The whole training state as of now: weights, optimiser, every random state, and
        ``progress`` (JSON-ready)."""
        self._require_equal_weights()
        return checkpoint.take_snapshot(self._state, progress, self.ranks, self._copies)

    def restore(self, folder: Path) -> dict[str, Any]:
        """Put a saved state back; returns its progress. Saved by another number of ranks, or by
        another engine, it is read all the same, and progress says so (``restored_from``).

        Raises
        ------
        DamagedCheckpoint
            A file of it is missing, cut short or not what it should be; nothing was changed.
        WorkspaceError
            It is of another model or format.
        """
        self.drop()
        return checkpoint.restore_state(folder, self._state, self.ranks)

    def export(self, folder: Path) -> None:
        """Write the model and tokenizer as ``from_pretrained`` takes them (rank 0 writes)."""
        self._require_equal_weights()
        weights = self._exported()
        export = partial(loading.export, self.model, self.tokenizer, folder, weights)
        on_first(self.ranks, export)

    def memory(self) -> dict[str, float]:
        """``memory/…`` metrics: the most of any rank so far, GiB."""
        return most_of_all(self.ranks, loading.memory_metrics(self.device))

    def _exported(self) -> dict[str, Any] | None:
        """Whole weights on rank 0; None: those of the model itself."""
        return None

    def _require_equal_weights(self) -> None:
        require_equal_weights(self.model, self.ranks)


class FrozenModel:
    """A model that only scores."""

    def __init__(self, model: Any) -> None:
        self.model = model.requires_grad_(False)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def score(self, batch: Batch, *, temperature: float = 1.0) -> TokenScores:
        """Log-probabilities of this rank's batch, without gradients."""
        return token_scores(self.model, batch, temperature=temperature)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    gathered = ranks.gather(_fingerprint(model)) or []
    odd = [rank for rank, value in enumerate(gathered) if value != gathered[0]]
    if odd := ranks.broadcast(odd):
        raise StageFailed(
            f"The weights of rank {odd[0]} are not those of rank 0, though both made the "
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


def most_of_all(ranks: Ranks, values: Mapping[str, float]) -> dict[str, float]:
    """The largest value of each name over all ranks."""
    gathered = ranks.gather(dict(values)) or []
    return ranks.broadcast({n: max((v[n] for v in gathered), default=0.0) for n in values})
