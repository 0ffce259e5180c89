"""Optimisers and learning-rate schedules.

In: a model and the fields of its configuration. Out: an :class:`Updater`, which turns accumulated
gradients into one step and has a state that can be saved.

Schedules are functions of the step alone, so there is no scheduler state to lose. Weights kept in
bfloat16 train through a float32 copy ("master weights"): at learning rates near 1e-6 most updates
would otherwise round to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch

Schedule = Literal["constant", "linear", "cosine"]

#: Quintic coefficients and step count of Muon's Newton-Schulz iteration (Jordan et al. 2024, "Muon:
#: An optimizer for hidden layers in neural networks", https://kellerjordan.github.io/posts/muon/).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MUON_MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.999)


def schedule_factor(
    step: int, total_steps: int, schedule: Schedule, warmup_ratio: float = 0.0
) -> float:
    """What the peak learning rate is multiplied by at ``step`` (counted from 0).

    Linear warm-up over the first ``round(total * warmup_ratio)`` steps, whose first is not 0; then
    constant, or down to 0 one step after the last.
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
    """U V^T of each matrix U S V^T, nearly: five steps leave singular values in about .7 to 1.2."""
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
    """Momentum, orthogonalised: each 2-D weight moves by the same amount in every direction.

    Nesterov momentum .95, then :func:`orthogonalize`, scaled by sqrt(max(1, rows / columns)). For
    hidden matrices only; embeddings, heads and vectors belong to AdamW. Decay is decoupled.
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


class Updater:
    """One or two torch optimisers over a model, with clipping and a common schedule."""

    def __init__(
        self,
        model: Any,
        *,
        learning_rate: float,
        weight_decay: float,
        max_grad_norm: float,
        muon_learning_rate: float | None = None,
    ) -> None:
        """``muon_learning_rate`` None trains everything with AdamW."""
        self.max_grad_norm = max_grad_norm
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._weights = [p for _, p in named]
        self._masters = [_master(p) for p in self._weights]
        hidden: list[Any] = []
        decayed: list[Any] = []
        rest: list[Any] = []
        embeddings = _embedding_ids(model)
        for weight, master in zip(self._weights, self._masters, strict=True):
            if muon_learning_rate is not None and weight.ndim == 2 and id(weight) not in embeddings:
                hidden.append(master)
            else:
                (decayed if weight.ndim >= 2 else rest).append(master)
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._optimizers: list[Any] = [
            torch.optim.AdamW(groups, lr=learning_rate, betas=ADAM_BETAS, eps=1e-8, fused=True)
        ]
        self._peaks = [learning_rate]
        if hidden and muon_learning_rate is not None:
            self._optimizers.append(Muon(hidden, muon_learning_rate, weight_decay))
            self._peaks.append(muon_learning_rate)

    def step(self, factor: float) -> float:
        """Apply the gradients at ``factor`` times the peak rates; returns the norm before clipping.

        Gradients are cleared. A norm that is not finite is returned and nothing is changed.
        """
        self._to_masters()
        limit = self.max_grad_norm if self.max_grad_norm > 0 else math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, limit))
        if math.isfinite(norm):
            for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = peak * factor
                optimizer.step()
            self._copy_masters()
        self.drop()
        return norm

    def gradient_norm(self) -> float:
        """The norm that :meth:`step` would return; gradients stay."""
        self._to_masters()
        gradients = [master.grad for master in self._masters if master.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def drop(self) -> None:
        """Clear the gradients."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.grad = master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Optimiser states, and the master weights where there are any."""
        masters = [
            None if master is weight else master.detach()
            for weight, master in zip(self._weights, self._masters, strict=True)
        ]
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "masters": masters,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state back; the model's weights must have been loaded already."""
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"], strict=True):
                if saved is not None:
                    master.copy_(saved)

    def _to_masters(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            if master is not weight:
                master.grad = None if weight.grad is None else weight.grad.float()

    def _copy_masters(self) -> None:
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                if master is not weight:
                    weight.copy_(master)


def _master(weight: Any) -> Any:
    if weight.dtype == torch.float32:
        return weight
    return torch.nn.Parameter(weight.detach().float().clone())


def _embedding_ids(model: Any) -> set[int]:
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    return {id(layer.weight) for layer in layers if layer is not None}
