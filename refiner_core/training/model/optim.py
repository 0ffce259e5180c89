"""Optimisers and learning-rate schedules.

In: a model and the fields of its configuration. Out: torch optimisers over its parameter groups,
stepped by an engine (:mod:`refiner_core.training.engines`).

Schedules are functions of the step alone, so there is no scheduler state to save. Weights in
bfloat16 train through a float32 copy ("master weights"): at learning rates near 1e-6 most updates
would otherwise round to nothing. Their gradients are summed in float32 as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

Schedule = Literal["constant", "linear", "cosine"]

#: Quintic coefficients and step count of Muon's Newton-Schulz iteration (Jordan et al. 2024, "Muon:
#: An optimizer for hidden layers in neural networks", https://kellerjordan.github.io/posts/muon/).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MUON_MOMENTUM = 0.95
ADAM_BETA1, ADAM_BETA2 = 0.9, 0.999
ADAM_EPS = 1e-8
#: An optimiser's tensors of a parameter: AdamW the first three, Muon the last.
ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")
MUON_STATE = ("momentum",)


def schedule_factor(
    step: int, total_steps: int, schedule: Schedule, warmup_ratio: float = 0.0
) -> float:
    """Factor on the peak learning rate at ``step`` (counted from 0).

    Linear warm-up over the first ``round(total * warmup_ratio)`` steps, nonzero from the first;
    then constant, or a decay to 0 one step after the last.
    """
    warmup = round(total_steps * warmup_ratio)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    if schedule == "linear":
        return max(0.0, 1.0 - done)
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return 1.0


def orthogonalize(matrices_BMN: torch.Tensor) -> torch.Tensor:
    """Approximately U V^T of each matrix U S V^T: five steps leave singular values of about
    .7-1.2."""
    a, b, c = NEWTON_SCHULZ
    x = matrices_BMN.to(torch.bfloat16 if matrices_BMN.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices_BMN.dtype)


class Muon(torch.optim.Optimizer):  # type: ignore[misc]  # torch is untyped here
    """Orthogonalised momentum: each 2-D weight moves by the same amount in every direction.

    Nesterov momentum .95, then :func:`orthogonalize`, scaled by sqrt(max(1, rows / columns)). For
    hidden matrices only; embeddings, heads and vectors use AdamW. Decay is decoupled.
    """

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient; matrices of one shape go together."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Any]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
            for same in by_shape.values():
                self._step_shape(same, group["lr"], group["weight_decay"])

    def _step_shape(self, parameters: list[Any], lr: float, weight_decay: float) -> None:
        directions = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum = state["momentum"].lerp_(parameter.grad, 1 - MUON_MOMENTUM)
            directions.append(parameter.grad.lerp(momentum, MUON_MOMENTUM))
        rows, columns = parameters[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for parameter, update in zip(
            parameters, orthogonalize(torch.stack(directions)), strict=True
        ):
            parameter.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * scale)


def parameter_groups(model: Any, *, muon: bool = False) -> tuple[list[str], list[str], list[str]]:
    """Names of parameters by their training (a tied one under its first): AdamW with decay
    on matrices, AdamW without decay on vectors, and with ``muon`` Muon on hidden matrices, last.

    Call it before ZeRO-3 partitions the weights, while they have their shapes.
    """
    hidden: list[str] = []
    decayed: list[str] = []
    rest: list[str] = []
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    embeddings = {id(layer.weight) for layer in layers if layer is not None}
    for name, weight in trainable(model).items():
        if muon and weight.ndim == 2 and id(weight) not in embeddings:
            hidden.append(name)
        else:
            (decayed if weight.ndim >= 2 else rest).append(name)
    return decayed, rest, hidden


def trainable(model: Any) -> dict[str, Any]:
    """Trainable parameters."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adamw(
    decayed: Sequence[str],
    rest: Sequence[str],
    weights: Mapping[str, Any],
    learning_rate: float,
    weight_decay: float,
    beta2: float = ADAM_BETA2,
) -> Any:
    """torch's AdamW over the parameters that are not Muon's."""
    chosen = [
        {"params": [weights[name] for name in names], "weight_decay": decay}
        for names, decay in ((decayed, weight_decay), (rest, 0.0))
        if names
    ]
    betas = (ADAM_BETA1, beta2)
    return torch.optim.AdamW(chosen, lr=learning_rate, betas=betas, eps=ADAM_EPS, fused=True)


def master_of(weight: Any) -> Any:
    """The float32 copy of a weight in a smaller type, else the weight itself."""
    if weight.dtype == torch.float32:
        return weight
    return torch.nn.Parameter(weight.detach().float().clone())


def adding_to(master: Any) -> Callable[[Any], None]:
    """A hook that moves a weight's gradient to its master copy, in float32."""

    def move(weight: Any) -> None:
        gradient = weight.grad
        weight.grad = None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)

    return move
