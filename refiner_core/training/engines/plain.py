"""Plain torch: every rank holds the model and its optimisers, and gradients are summed.

In: a loaded model, its learning rates, and the ranks that train together. Out: an
:class:`~refiner_core.training.engines.protocol.Engine`.

This is also ZeRO-0, which shards nothing: each rank sums the gradients of a step over its packs in
float32, then they are summed once over the ranks, and every rank makes the same update. Weights
stay bitwise equal on all ranks; a snapshot and an export verify it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from refiner_core.contract.config import ModelConfig, RecipeConfig, Resources, SftConfig
from refiner_core.contract.placement import section_of
from refiner_core.generation.load import device_for
from refiner_core.training.batches import Batch, seed_random
from refiner_core.training.engines.protocol import Engine, ParameterState
from refiner_core.training.model import loading
from refiner_core.training.model.logprobs import Entropy, TokenScores, token_scores
from refiner_core.training.model.optim import (
    ADAM_BETA2,
    ADAM_STATE,
    MUON_STATE,
    Muon,
    adamw,
    adding_to,
    master_of,
    parameter_groups,
    trainable,
)
from refiner_core.training.pulse import PULSE
from refiner_core.training.ranks import Ranks, gpu_of


class PlainEngine(Engine):
    """Torch's own optimisers, in one process or data-parallel in several processes.

    Parameters
    ----------
    learning_rate, weight_decay, adam_beta2
        Peak rate of AdamW, decoupled decay, and decay of its mean of squared gradients.
    max_grad_norm
        Limit of the gradient norm; 0 disables clipping.
    muon_learning_rate
        Peak rate of Muon on hidden matrices; None trains all parameters with AdamW.
    """

    def __init__(
        self,
        loaded: loading.LoadedModel,
        config: ModelConfig,
        ranks: Ranks | None = None,
        *,
        learning_rate: float,
        weight_decay: float = 0.0,
        adam_beta2: float = ADAM_BETA2,
        max_grad_norm: float = 0.0,
        muon_learning_rate: float | None = None,
    ) -> None:
        super().__init__(loaded, loaded.device, config, ranks or Ranks())
        self.max_grad_norm = max_grad_norm
        decayed, rest, hidden = parameter_groups(self.model, muon=muon_learning_rate is not None)
        self._hidden = set(hidden)
        self._weights = trainable(self.model)
        self._masters = {name: master_of(weight) for name, weight in self._weights.items()}
        for weight, master in self._copied_weights():
            weight.register_post_accumulate_grad_hook(adding_to(master))
        made = adamw(decayed, rest, self._masters, learning_rate, weight_decay, adam_beta2)
        self._optimizers: list[tuple[Any, float]] = [(made, learning_rate)]  # with their peak rates
        if hidden and muon_learning_rate is not None:
            muon = Muon([self._masters[n] for n in hidden], muon_learning_rate, weight_decay)
            self._optimizers.append((muon, muon_learning_rate))
        self._norm: Any = None  # of the gradients of all ranks, once they are summed

    def score(
        self, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "off"
    ) -> TokenScores:
        """Log-probabilities of the batch's targets."""
        PULSE.moved += 1
        return token_scores(self.model, batch, temperature=temperature, entropy=entropy)

    def backward(self, loss: Any) -> None:
        """Add the gradients of a loss."""
        if self._norm is not None:
            raise RuntimeError("gradients are already summed over the ranks; step or drop first")
        loss.backward()

    def step(self, factor: float) -> float:
        """Update, clear the gradients, and return their norm before clipping."""
        norm = self.gradient_norm()
        if math.isfinite(norm):
            if self.max_grad_norm > 0:
                masters = list(self._masters.values())
                torch.nn.utils.clip_grads_with_norm_(masters, self.max_grad_norm, self._norm)
            for optimizer, peak in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = peak * factor
                optimizer.step()
            with torch.no_grad():
                for weight, master in self._copied_weights():
                    weight.copy_(master)
        self.drop()
        return norm

    def gradient_norm(self) -> float:
        """The gradient norm; sums the gradients over the ranks."""
        if self._norm is None:
            masters = self._masters.values()
            if self.ranks.world > 1:
                sum_over_ranks(list(masters), self.ranks)
            gradients = [master.grad for master in masters if master.grad is not None]
            self._norm = torch.nn.utils.get_total_norm(gradients)
        return float(self._norm)

    def drop(self) -> None:
        """Clear the gradients."""
        self._norm = None
        for tensor in (*self._weights.values(), *self._masters.values()):
            tensor.grad = None

    def states(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, ParameterState]]:
        """Live tensors of each parameter, by kind; only the master of a parameter that was never
        updated."""
        for name, master in self._masters.items():
            if wanted(name):
                own = {} if master is self._weights[name] else {"master": master.detach()}
                for optimizer, _ in self._optimizers:
                    own.update(optimizer.state.get(master, {}))
                yield name, own

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def set_states(self, state_of: Callable[[str], ParameterState]) -> None:
        """Copy states in."""
        for name, master in self._masters.items():
            state, muon = state_of(name), name in self._hidden
            if master is not self._weights[name]:
                master.copy_(state.get("master", self._weights[name]))
            optimizer, _ = self._optimizers[1 if muon else 0]
            optimizer.state.pop(master, None)
            kinds = MUON_STATE if muon else ADAM_STATE
            if all(kind in state for kind in kinds):
                optimizer.state[master] = {
                    kind: state[kind].to(master.device, torch.float32, copy=True) for kind in kinds
                }

    def _copied_weights(self) -> Iterator[tuple[Any, Any]]:
        """Weights with a separate master copy, together with it."""
        for weight, master in zip(self._weights.values(), self._masters.values(), strict=True):
            if master is not weight:
                yield weight, master


def open_engine(
    config: RecipeConfig, stage: str, model_ref: str, ranks: Ranks | None = None
) -> Engine:
    """The model of ``model_ref``, ready for training by the stage's section.

    ``deepspeed_stage`` 1 to 3 shards optimiser states, gradients and weights with DeepSpeed. 0
    shards nothing, and is plain torch also on several ranks: DeepSpeed's stage 0 sums bfloat16
    gradients in bfloat16.

    Raises
    ------
    ConfigurationError
        The model cannot be found or read.
    UnsupportedError
        The model cannot be packed, or this machine lacks something that the section requires.
    """
    seed_random(config.seed)  # before anything draws; a checkpoint's states are restored later
    section = section_of(config, stage)
    muon = section if isinstance(section, SftConfig) and section.optimizer == "muon" else None
    ranks = ranks or Ranks()
    device = device_of(section.resources, ranks)
    if section.deepspeed_stage:
        from refiner_core.training.engines.zero import open_zero_engine

        return open_zero_engine(section, config.model, model_ref, ranks, device)
    loaded = loading.load_for_training(model_ref, config.model, device)
    return PlainEngine(
        *(loaded, config.model, ranks),
        learning_rate=section.learning_rate,
        weight_decay=section.weight_decay,
        adam_beta2=section.adam_beta2,
        max_grad_norm=section.max_grad_norm,
        muon_learning_rate=None if muon is None else muon.muon_learning_rate,
    )


def device_of(resources: Resources, ranks: Ranks) -> Any:
    """This rank's GPU if one is requested, else the CPU.

    Raises
    ------
    UnsupportedError
        A GPU is requested and torch sees none.
    ConfigurationError
        This rank has none.
    """
    device = device_for(resources)
    if device.type == "cpu" or ranks.world == 1:
        return device
    return torch.device("cuda", gpu_of(ranks.local_rank))


def sum_over_ranks(parameters: Sequence[Any], ranks: Ranks) -> None:
    """Replace float32 gradients by their sums over all ranks, bitwise equal on each.

    A parameter without a gradient on one rank counts as 0 there; one without any gradient keeps
    none.
    """
    import torch.distributed as dist

    counts = ranks.add([parameter.grad is not None for parameter in parameters])
    sums = []
    with PULSE.collective("all_reduce of the gradients"):
        for parameter, count in zip(parameters, counts, strict=True):
            if count:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = gradient.contiguous()
                sums.append(dist.all_reduce(parameter.grad, async_op=True))
        for one in sums:
            one.wait()
