"""The training state of a model that DeepSpeed has shared out, parameter by parameter.

In: an engine of DeepSpeed. Out: a :class:`~refiner_core.training.state.checkpoint.StateSource`:
whole tensors under the model's own names, gathered one at a time, and the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from refiner_core.training.model.optim import Groups, trainable
from refiner_core.training.model.tensors import SavedTensors, model_tensors
from refiner_core.training.state.checkpoint import ParameterState

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroState:
    """What a snapshot is taken of; every method is called by all ranks alike."""

    def __init__(self, model: Any, wrapped: Any, groups: Groups, stage: int) -> None:
        self.model, self._wrapped, self._groups = model, wrapped, groups
        self.stage = stage

    @property
    def name(self) -> str:
        """`zero1` to `zero3`."""
        return f"zero{self.stage}"

    @property
    def groups(self) -> Groups:
        """How the parameters are trained."""
        return self._groups

    @property
    def partitioned(self) -> bool:
        """Whether weights are shared out."""
        return self.stage == 3

    def sizes(self) -> dict[str, int]:
        """Names and numbers of elements of trained parameters."""
        return {name: _shape(p).numel() for name, p in trainable(self.model).items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and whole shapes of all weights."""
        return {name: tuple(_shape(tensor)) for name, tensor in self._tensors().items()}

    def weights(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Whole weights, one at a time."""
        for name, tensor in self._tensors().items():
            with gathered([tensor]):
                yield name, tensor.detach() if wanted(name) else None

    def states(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, ParameterState]]:
        """Whole masters and moments, one parameter at a time."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        steps = self._steps()
        if steps is not None:
            self._link_moments()
        for name, parameter in trainable(self.model).items():
            state: dict[str, torch.Tensor] = {}
            if parameter.dtype != torch.float32:
                _keep(state, "master", safe_get_full_fp32_param(parameter), wanted(name))
            if steps is not None:
                for kind in _MOMENTS:
                    whole = safe_get_full_optimizer_state(parameter, kind)
                    _keep(state, kind, whole, wanted(name))
                state["step"] = steps
            if wanted(name):
                yield name, state

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def set_weights(self, weights: SavedTensors) -> None:
        """Copy weights in; under ZeRO-3 rank 0 reads and the others get their share."""
        import torch.distributed as dist

        for name, tensor in self._tensors().items():
            with gathered([tensor], changed=True):
                if not self.partitioned or dist.get_rank() == 0:
                    tensor.copy_(weights[name])
        if not self.partitioned:
            return
        dist.barrier()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def set_states(self, state_of: Callable[[str], ParameterState]) -> None:
        """Copy states in: each rank reads whole tensors and keeps its share."""
        steps: float | None = None
        self._forget_moments()
        for name, parameter in trainable(self.model).items():
            state = state_of(name)
            with gathered([parameter]):
                weight = parameter.detach().float()
                self._set(parameter, None, state.get("master", weight))
            if all(kind in state for kind in (*_MOMENTS, "step")):
                if steps is None:
                    self._make_moments()
                steps = max(steps or 0.0, float(state["step"]))
                for kind in _MOMENTS:
                    self._set(parameter, kind, state[kind])
        if steps is not None:
            for flat in self._flat():
                self._state_of(flat)["step"].fill_(steps)

    def _set(self, parameter: Any, kind: str | None, whole: torch.Tensor) -> None:
        """Put this rank's share of a whole float32 tensor where the optimiser has it."""
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        if not self.partitioned:
            whole = whole.to(parameter.device)
            if kind is None:
                safe_set_full_fp32_param(parameter, whole)
            else:
                safe_set_full_optimizer_state(parameter, whole, kind)
            return
        share = _share(parameter, whole)
        if kind is None:
            safe_set_local_fp32_param(parameter, share)
        else:
            safe_set_local_optimizer_state(parameter, share, kind)

    def _tensors(self) -> dict[str, Any]:
        """Parameters and persistent buffers, as they lie here."""
        if not self.partitioned:
            return dict(model_tensors(self.model))
        tensors: dict[str, Any] = dict(self.model.named_parameters())
        names = self.model.state_dict(keep_vars=True).keys()
        tensors.update((n, b) for n, b in self.model.named_buffers() if n in names)
        return tensors

    # ------------------------------------------------------------ flat partitions

    def _flat(self) -> list[Any]:
        """This rank's flat float32 partitions, which the optimiser steps."""
        optimizer = self._wrapped.optimizer
        for name in (
            *("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"),
            *("fp32_groups_flat_partition",),
        ):
            if hasattr(optimizer, name):
                return list(getattr(optimizer, name))
        raise RuntimeError(f"{type(optimizer).__name__} keeps its partitions elsewhere")

    def _state_of(self, flat: Any) -> dict[str, Any]:
        state: dict[str, Any] = self._wrapped.basic_optimizer.state[flat]
        return state

    def _steps(self) -> torch.Tensor | None:
        """How many updates were made; None before the first."""
        states = self._wrapped.basic_optimizer.state
        found = [states[flat]["step"] for flat in self._flat() if states.get(flat)]
        return found[0].detach().to("cpu") if found else None

    def _make_moments(self) -> None:
        for flat in self._flat():
            self._state_of(flat).update(
                step=torch.zeros((), dtype=torch.float32, device=flat.device),
                exp_avg=torch.zeros_like(flat),
                exp_avg_sq=torch.zeros_like(flat),
            )
        self._link_moments()

    def _link_moments(self) -> None:
        """Let parameters know where their moments are. DeepSpeed does it once, after the first of
        its parameter groups was stepped: the other groups' moments are not there yet."""
        optimizer = self._wrapped.optimizer
        if not self.partitioned:
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()

    def _forget_moments(self) -> None:
        for flat in self._flat():
            self._wrapped.basic_optimizer.state.pop(flat, None)


@contextmanager
def gathered(tensors: list[Any], *, changed: bool = False) -> Iterator[None]:
    """Whole weights of ZeRO-3 parameters on every rank; others are whole already. With ``changed``
    rank 0's values go to all at the end."""
    partitioned = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if changed else None):
        yield


def _shape(tensor: Any) -> Any:
    return getattr(tensor, "ds_shape", tensor.shape)


def _share(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, padded like DeepSpeed's."""
    import torch.distributed as dist

    size = parameter.ds_tensor.numel()
    flat = whole.flatten()
    start = min(len(flat), dist.get_rank() * size)
    part = flat[start : start + size]
    return torch.cat([part, part.new_zeros(size - len(part))])


def _keep(state: dict[str, Any], kind: str, whole: Any, wanted: bool) -> None:
    if wanted and whole is not None:
        state[kind] = whole
