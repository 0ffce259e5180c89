"""What a training loop may ask of whatever moves the weights.

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

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from refiner_core.training.batches.packing import Batch
from refiner_core.training.model.logprobs import Entropy, TokenScores
from refiner_core.training.ranks import Ranks


class Snapshot(Protocol):
    """The state of one moment, in host memory: later steps do not change it."""

    def write(self, folder: Path) -> None:
        """Write this rank's files into a checkpoint's folder and fsync them. No rank waits for
        another here; may be called from another thread, and again after a full disk."""
        ...


class Engine(Protocol):
    """A model in training. Every method is called by all ranks together, but where it says not."""

    @property
    def ranks(self) -> Ranks:
        """The processes that train together."""
        ...

    @property
    def device(self) -> Any:
        """Where batches must lie."""
        ...

    @property
    def model(self) -> Any:
        """The transformers model. Its weights are there inside :meth:`whole` only."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        ...

    @property
    def share_prompts(self) -> bool:
        """Whether samples of one prompt may share it in a pack."""
        ...

    @property
    def balance(self) -> float | None:
        """What :func:`refiner_core.training.batches.packing.collate` calls so."""
        ...

    @property
    def pad_id(self) -> int:
        """What padding is made of."""
        ...

    def score(
        self, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "off"
    ) -> TokenScores:
        """Log-probabilities of this rank's batch, with gradients where torch records them."""
        ...

    def backward(self, loss: Any) -> None:
        """Add the gradients of this rank's part of the loss."""
        ...

    def step(self, factor: float) -> float:
        """Update with the gradients of all ranks at ``factor`` times the peak rates; clear them.

        Returns the global gradient norm before clipping; one that is not finite changes nothing.
        """
        ...

    def gradient_norm(self) -> float:
        """The global norm that the next :meth:`step` would report; gradients stay, and none can be
        added any more."""
        ...

    def drop(self) -> None:
        """Clear the gradients without an update."""
        ...

    def reference(self, model_ref: str) -> Scorer:
        """A frozen model beside it, for the KL term, on this rank's device."""
        ...

    def whole(self) -> AbstractContextManager[Any]:
        """The model with all its weights and in evaluation mode, to read (generate, export, send to
        servers)."""
        ...

    def snapshot(self, progress: Mapping[str, Any]) -> Snapshot:
        """The whole training state as of now: weights, optimiser, every random state, and
        ``progress`` (JSON-ready)."""
        ...

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
        ...

    def export(self, folder: Path) -> None:
        """Write the model and tokenizer as ``from_pretrained`` takes them (rank 0 writes)."""
        ...

    def memory(self) -> dict[str, float]:
        """``memory/…`` metrics: the most of any rank so far, GiB."""
        ...


class Scorer(Protocol):
    """A frozen model that gives log-probabilities."""

    def score(self, batch: Batch, *, temperature: float = 1.0) -> TokenScores:
        """Log-probabilities of this rank's batch, without gradients."""
        ...
