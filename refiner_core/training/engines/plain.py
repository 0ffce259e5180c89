"""Plain torch: every rank holds the model and its optimisers, and gradients are summed.

In: a loaded model, its updater, and the ranks that train together. Out: an
:class:`~refiner_core.training.engines.protocol.Engine`.

This is also what ZeRO-0 means, which shares nothing out: the gradients of a step are added up over
its packs in float32 on each rank, then once over the ranks, and every rank makes the same update.
Weights stay bitwise equal on all ranks; a snapshot and an export check that they did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from refiner_core.contract.config import ModelConfig, RecipeConfig, Resources, SftConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.placement import TrainingStage, section_of
from refiner_core.generation.load import device_for
from refiner_core.training.batches import Batch, seed_random
from refiner_core.training.engines.protocol import Engine, ParameterState, evaluating
from refiner_core.training.model import loading
from refiner_core.training.model.loading import (
    SavedTensors,
    copy_weights,
    model_tensors,
    shapes_of,
)
from refiner_core.training.model.logprobs import Entropy, TokenScores, token_scores
from refiner_core.training.model.optim import Updater, trainable
from refiner_core.training.ranks import Ranks, gpu_of

#: Gradients that travel together (float32 elements): 256 MiB.
BUCKET_ELEMENTS = 1 << 26


class PlainEngine(Engine):
    """Torch's own optimisers, in one process or data-parallel in several."""

    def __init__(
        self,
        loaded: loading.Loaded,
        updater: Updater,
        config: ModelConfig,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(loaded, loaded.device, config, ranks or Ranks())
        self.updater, self._summed = updater, False

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

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """The model, which is always whole here, in evaluation mode."""
        with evaluating(self.model):
            yield self.model

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all weights."""
        return shapes_of(model_tensors(self.model))

    def weights(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The weights themselves."""
        for name, tensor in model_tensors(self.model).items():
            yield name, tensor if wanted(name) else None

    def states(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, ParameterState]]:
        """What the updater keeps of each."""
        for name in trainable(self.model):
            if wanted(name):
                yield name, self.updater.state_of(name)

    def set_weights(self, weights: SavedTensors) -> None:
        """Copy weights in."""
        copy_weights(model_tensors(self.model), weights)

    def set_states(self, state_of: Callable[[str], ParameterState]) -> None:
        """Hand states to the updater."""
        for name in trainable(self.model):
            self.updater.set_state_of(name, state_of(name))

    def _sum(self) -> None:
        """Once per step: this rank's gradients become those of all."""
        if self._summed or self.ranks.world == 1:
            return
        gradients = self.updater.gradients()
        summed = sum_over_ranks(gradients, self.updater.shapes, self.ranks, self.device)
        self.updater.set_gradients(summed)
        self._summed = True


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
    ranks = ranks or Ranks()
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
