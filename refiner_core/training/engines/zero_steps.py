"""What DeepSpeed's optimisers know and have no public name for: their norm, and giving a step up.

In: an engine of DeepSpeed after the last backward pass of a step. Out: the global gradient norm; or
no gradients. One place for what may change with DeepSpeed's version; tests run all of it.
"""

from __future__ import annotations

import logging
import math
from typing import Any

#: What DeepSpeed puts in the place of a norm that is not finite.
_INVALID = -1.0


def gradient_norm(optimizer: Any) -> float:
    """The global 2-norm of the summed gradients; infinite where it is not finite."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.utils import get_global_norm_of_tensors

    if isinstance(optimizer, BF16_Optimizer):
        gradients, _ = optimizer.get_grads_for_norm()
        norm = float(get_global_norm_of_tensors(gradients, norm_type=optimizer.norm_type))
    elif hasattr(optimizer, "scaled_global_norm"):  # ZeRO-1 and 2
        norm = float(optimizer.scaled_global_norm())
    else:
        norm = _combined(optimizer._get_norm_groups())
    return norm if math.isfinite(norm) and norm >= 0 else math.inf


def drop_gradients(wrapped: Any) -> None:
    """Take the way that DeepSpeed takes for gradients that are not finite: nothing is changed, and
    all that was accumulated is cleared."""
    import torch
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    optimizer = wrapped.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()
        return
    zero3 = not hasattr(optimizer, "scaled_global_norm")
    name = "_get_norm_groups" if zero3 else "scaled_global_norm"
    invalid = torch.tensor(_INVALID)
    setattr(optimizer, name, lambda *_: [invalid] if zero3 else invalid)
    said = logging.getLogger("DeepSpeed")
    level = said.level
    said.setLevel(logging.ERROR)  # it would warn of an overflow
    try:
        wrapped.step()
    finally:
        said.setLevel(level)
        delattr(optimizer, name)
    if not optimizer.overflow:
        raise RuntimeError("DeepSpeed made an update that was to be given up")
    if not zero3:  # with offload it forgets these, and would add the next step's to them
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None


def _combined(norms: Any) -> float:
    values = [float(norm) for norm in norms]
    if any(not math.isfinite(value) or value < 0 for value in values):
        return math.inf
    return math.sqrt(sum(value * value for value in values))
