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

from refiner_core.contract.config import RecipeConfig, SftConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.placement import TrainingStage, section_of
from refiner_core.contract.steering_config import Resources
from refiner_core.generation.load import device_for
from refiner_core.training.batches import Batch, seed_random
from refiner_core.training.engines.plain import PlainEngine
from refiner_core.training.model import loading
from refiner_core.training.model.logprobs import Entropy, TokenScores
from refiner_core.training.model.optim import Updater
from refiner_core.training.ranks import OneRank, Ranks, gpu_of


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
        """What :func:`refiner_core.training.batches.collate` calls so."""
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


def open_engine(
    config: RecipeConfig,
    stage: TrainingStage,
    model_ref: str,
    ranks: Ranks | None = None,
) -> Engine:
    """The model of ``model_ref``, ready to be trained as the stage's section says.

    ``deepspeed_stage`` 1 to 3 shares optimiser states, gradients and weights out by DeepSpeed. 0
    shares nothing, and is what plain torch does over several ranks: DeepSpeed's own way of it adds
    bfloat16 gradients up in bfloat16.

    Raises
    ------
    ConfigurationError
        The model cannot be found or read.
    UnsupportedError
        It cannot be packed, or this machine lacks what the section asks for.
    """
    seed_random(config.seed)  # before anything draws; a checkpoint's states are put back later
    section = section_of(config, stage)
    muon = section if isinstance(section, SftConfig) and section.optimizer == "muon" else None
    ranks = ranks or OneRank()
    device = device_of(section.resources, ranks)
    if section.deepspeed_stage:
        if muon is not None:
            raise UnsupportedError(
                f"Muon needs whole matrices, and {stage}.deepspeed_stage={muon.deepspeed_stage} "
                "shares them out",
                expected=f"{stage}.optimizer=adamw, or {stage}.deepspeed_stage 0 or null",
                fix=f"set {stage}.optimizer=adamw",
            )
        from refiner_core.training.engines.zero import open_zero_engine

        return open_zero_engine(section, config.model, model_ref, ranks, device)
    loaded = loading.load_for_training(model_ref, config.model, device)
    updater = Updater(
        loaded.model,
        learning_rate=section.learning_rate,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        muon_learning_rate=None if muon is None else muon.muon_learning_rate,
    )
    return PlainEngine(loaded, updater, config.model, ranks)


def device_of(resources: Resources, ranks: Ranks) -> Any:
    """This rank's GPU where one is asked for, else the CPU.

    Raises
    ------
    UnsupportedError
        If a GPU is asked for and torch sees none.
    ConfigurationError
        If this rank has none.
    """
    import torch

    device = device_for(resources)
    if device.type == "cpu" or ranks.world == 1:
        return device
    return torch.device("cuda", gpu_of(ranks.local_rank))
