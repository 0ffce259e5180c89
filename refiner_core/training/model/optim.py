"""Optimisers and learning-rate schedules.

In: a model and the fields of its configuration. Out: an :class:`Updater`, which turns accumulated
gradients into one step and has a state that can be saved, parameter by parameter under its name.

Schedules are functions of the step alone, so there is no scheduler state to lose. Weights kept in
bfloat16 train through a float32 copy ("master weights"): at learning rates near 1e-6 most updates
would otherwise round to nothing. Their gradients are added up in float32, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

Schedule = Literal["constant", "linear", "cosine"]

#: Quintic coefficients and step count of Muon's Newton-Schulz iteration (Jordan et al. 2024, "Muon:
#: An optimizer for hidden layers in neural networks", https://kellerjordan.github.io/posts/muon/).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MUON_MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
#: What an optimiser keeps of a parameter: AdamW the first three, Muon the last.
ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")
MUON_STATE = ("momentum",)


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


class Groups(NamedTuple):
    """Names of a model's parameters by how they are trained; a tied one under its first name."""

    decayed: tuple[str, ...]
    rest: tuple[str, ...]
    hidden: tuple[str, ...]


def parameter_groups(model: Any, *, muon: bool = False) -> Groups:
    """AdamW with decay on matrices, without on vectors; with ``muon`` hidden matrices are Muon's.

    Call it while weights have their shapes: before ZeRO-3 takes them apart.
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
    return Groups(tuple(decayed), tuple(rest), tuple(hidden))


def trainable(model: Any) -> dict[str, Any]:
    """Parameters that training moves."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adamw(
    groups: Groups, weights: Mapping[str, Any], learning_rate: float, weight_decay: float
) -> Any:
    """torch's AdamW over the parameters that are not Muon's."""
    chosen = [
        {"params": [weights[name] for name in names], "weight_decay": decay}
        for names, decay in ((groups.decayed, weight_decay), (groups.rest, 0.0))
        if names
    ]
    return torch.optim.AdamW(chosen, lr=learning_rate, betas=ADAM_BETAS, eps=ADAM_EPS, fused=True)


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
        self.groups = parameter_groups(model, muon=muon_learning_rate is not None)
        self._weights = trainable(model)
        self._masters = {name: _master(weight) for name, weight in self._weights.items()}
        for name, weight in self._weights.items():
            if self._masters[name] is not weight:
                weight.register_post_accumulate_grad_hook(_adding_to(self._masters[name]))
        self._optimizers: list[Any] = [
            adamw(self.groups, self._masters, learning_rate, weight_decay)
        ]
        self._peaks = [learning_rate]
        if self.groups.hidden and muon_learning_rate is not None:
            hidden = [self._masters[name] for name in self.groups.hidden]
            self._optimizers.append(Muon(hidden, muon_learning_rate, weight_decay))
            self._peaks.append(muon_learning_rate)
        self._norm: Any = None

    def step(self, factor: float) -> float:
        """Apply the gradients at ``factor`` times the peak rates; returns the norm before clipping.

        Gradients are cleared. A norm that is not finite is returned and nothing is changed.
        """
        norm = self.gradient_norm()
        if math.isfinite(norm):
            if self.max_grad_norm > 0:
                masters = list(self._masters.values())
                torch.nn.utils.clip_grads_with_norm_(masters, self.max_grad_norm, self._norm)
            for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = peak * factor
                optimizer.step()
            self._copy_masters()
        self.drop()
        return norm

    def gradient_norm(self) -> float:
        """The norm that :meth:`step` would return; gradients stay. It is computed once."""
        if self._norm is None:
            gradients = [g for g in self.gradients() if g is not None]
            self._norm = torch.nn.utils.get_total_norm(gradients)
        return float(self._norm)

    def forget_norm(self) -> None:
        """More gradients were added."""
        self._norm = None

    def gradients(self) -> list[Any]:
        """The gradient of each parameter, float32; None where it has none."""
        for weight, master in zip(self._weights.values(), self._masters.values(), strict=True):
            if master is not weight and weight.grad is not None:
                _adding_to(master)(weight)  # a gradient that did not come from a backward pass
        return [master.grad for master in self._masters.values()]

    @property
    def shapes(self) -> list[Any]:
        """The shape of each parameter, in the order of :meth:`gradients`."""
        return [master.shape for master in self._masters.values()]

    def set_gradients(self, gradients: Sequence[Any]) -> None:
        """Replace what :meth:`gradients` gave."""
        self._norm = None
        for master, gradient in zip(self._masters.values(), gradients, strict=True):
            master.grad = gradient

    def drop(self) -> None:
        """Clear the gradients."""
        self._norm = None
        for weight, master in zip(self._weights.values(), self._masters.values(), strict=True):
            weight.grad = master.grad = None

    def state_of(self, name: str) -> dict[str, torch.Tensor]:
        """What training keeps of a parameter beside its weight: the live tensors, by kind. Nothing
        of one that has never been updated, but for ``master``."""
        master, found = self._masters[name], {}
        if master is not self._weights[name]:
            found["master"] = master.detach()
        for optimizer in self._optimizers:
            if master in optimizer.state:
                found.update(optimizer.state[master])
        return found

    def set_state_of(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        """Take a parameter's state back; its weight must have been set already."""
        master = self._masters[name]
        with torch.no_grad():
            if master is not self._weights[name]:
                master.copy_(state.get("master", self._weights[name]))
        muon = name in self.groups.hidden
        optimizer = self._optimizers[1 if muon else 0]
        kinds = MUON_STATE if muon else ADAM_STATE
        optimizer.state.pop(master, None)
        if all(kind in state for kind in kinds):
            optimizer.state[master] = {
                kind: state[kind].to(master.device, torch.float32, copy=True) for kind in kinds
            }

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """:meth:`state_of` every parameter."""
        return {name: self.state_of(name) for name in self._weights}

    def _copy_masters(self) -> None:
        with torch.no_grad():
            for weight, master in zip(self._weights.values(), self._masters.values(), strict=True):
                if master is not weight:
                    weight.copy_(master)


def _master(weight: Any) -> Any:
    if weight.dtype == torch.float32:
        return weight
    return torch.nn.Parameter(weight.detach().float().clone())


def _adding_to(master: Any) -> Callable[[Any], None]:
    """Moves a weight's gradient to its master copy, in float32."""

    def move(weight: Any) -> None:
        gradient = weight.grad
        weight.grad = None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)

    return move
