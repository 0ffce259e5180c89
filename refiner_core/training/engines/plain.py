"""Plain torch: the model and its optimisers in this process.

In: a model reference and the configuration of a training stage. Out: an
:class:`~refiner_core.training.engines.protocol.Engine`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from refiner_core.contract.config import ModelConfig
from refiner_core.training import checkpoint, engine
from refiner_core.training.logprobs import Entropy, TokenScores, token_scores
from refiner_core.training.optim import Updater
from refiner_core.training.packing import Batch
from refiner_core.training.ranks import OneRank, Ranks


class PlainEngine:
    """One process, torch's own optimisers."""

    def __init__(
        self,
        loaded: engine.Loaded,
        updater: Updater,
        config: ModelConfig,
        ranks: Ranks | None = None,
    ) -> None:
        self.loaded, self.updater, self._config = loaded, updater, config
        self.ranks: Ranks = ranks or OneRank()
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.share_prompts, self.balance = loaded.share_prompts, loaded.balance

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
        loss.backward()

    def step(self, factor: float) -> float:
        """Update, clear the gradients, and return their norm before clipping."""
        return self.updater.step(factor)

    def gradient_norm(self) -> float:
        """The norm of the gradients so far."""
        return self.updater.gradient_norm()

    def drop(self) -> None:
        """Clear the gradients."""
        self.updater.drop()

    def reference(self, model_ref: str) -> FrozenModel:
        """Another copy of a model, frozen."""
        return FrozenModel(engine.load_model(model_ref, self._config, self.device))

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """The model, which is always whole here."""
        yield self.model

    def snapshot(self, progress: Mapping[str, Any]) -> checkpoint.StateSnapshot:
        """The state as of now."""
        return checkpoint.take_snapshot(self.model, self.updater, dict(progress))

    def restore(self, folder: Path) -> dict[str, Any]:
        """Put a saved state back; returns its progress."""
        return checkpoint.load_state(folder, self.model, self.updater)

    def export(self, folder: Path) -> None:
        """Write model and tokenizer."""
        engine.export(self.model, self.tokenizer, folder)

    def memory(self) -> dict[str, float]:
        """The most memory taken so far."""
        return engine.memory_metrics(self.model)


class FrozenModel:
    """A model that only scores."""

    def __init__(self, model: Any) -> None:
        self.model = model.requires_grad_(False)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def score(self, batch: Batch, *, temperature: float = 1.0) -> TokenScores:
        """Log-probabilities of the batch's targets."""
        return token_scores(self.model, batch, temperature=temperature)
