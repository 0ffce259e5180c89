"""Plain torch: every rank holds the model and its optimisers, and gradients are summed.

In: a loaded model, its updater, and the ranks that train together. Out: an
:class:`~refiner_core.training.engines.protocol.Engine`.

This is also what ZeRO-0 means, which shares nothing out: the gradients of a step are added up over
its packs in float32 on each rank, then once over the ranks, and every rank makes the same update.
Weights stay bitwise equal on all ranks; a snapshot and an export check that they did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from refiner_core.contract.config import ModelConfig
from refiner_core.training.batches.packing import Batch
from refiner_core.training.engines.together import (
    evaluating,
    most_of_all,
    on_first_rank,
    require_equal_weights,
    sum_over_ranks,
)
from refiner_core.training.model import loading
from refiner_core.training.model.logprobs import Entropy, TokenScores, token_scores
from refiner_core.training.model.optim import Updater
from refiner_core.training.ranks import OneRank, Ranks
from refiner_core.training.state import checkpoint
from refiner_core.training.state.host_copies import HostCopies


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
