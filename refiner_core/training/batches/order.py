"""Which row when: orders that are functions of the seed and the step, not of what ran before.

In: the run's seed and how many rows there are. Out: indices. Nothing here has state, so a resumed
run needs no iterator to be wound forward; checkpoints store position and a hash of the rows only
to notice when the data changed underneath them.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refiner_core.contract.errors import DataError
from refiner_core.contract.seeds import derive_seed
from refiner_core.training.batches.packing import first_fit

#: Packs kept open while an epoch is packed in shuffled order.
OPEN_PACKS = 64


def permutation(n: int, *seed_parts: int | str) -> list[int]:
    """A shuffle of range(n) that depends on the seed parts alone."""
    rng = np.random.Generator(np.random.PCG64(derive_seed(*seed_parts)))
    order: list[int] = rng.permutation(n).tolist()
    return order


def seed_random(seed: int) -> None:
    """Seed the process's own generators, for whatever draws from them without asking: a model with
    dropout, a library. Python's and NumPy's begin somewhere else in every process otherwise, so
    that two runs would be two different ones."""
    import torch

    random.seed(derive_seed(seed, "python"))
    np.random.seed(derive_seed(seed, "numpy") % 2**32)
    torch.manual_seed(derive_seed(seed, "torch"))


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one GRPO step: indices into the prepared rows, and where they stand."""

    epoch: int
    cursor: int
    indices: tuple[int, ...]


def prompt_batch(seed: int, n_prompts: int, per_step: int, step: int) -> PromptBatch:
    """The prompts of ``step`` (from 0): the next ``per_step`` of the epoch's shuffle.

    The tail of an epoch that is shorter than a step is left out; each epoch's shuffle leaves out
    others. A prompt is therefore never twice in a step.

    Raises
    ------
    DataError
        If there are fewer prompts than one step asks for.
    """
    if n_prompts < per_step:
        raise DataError(
            f"There are {n_prompts} training prompts, and one step takes {per_step}",
            expected="at least as many prompts as grpo.num_unique_prompts_rollout",
            fix="add prompts, or lower grpo.num_unique_prompts_rollout",
        )
    epoch, within = divmod(step, n_prompts // per_step)
    order = permutation(n_prompts, seed, "prompts", epoch)
    cursor = within * per_step
    return PromptBatch(epoch, cursor, tuple(order[cursor : cursor + per_step]))


@dataclass(frozen=True)
class SftStep:
    """One optimiser step: its epoch, and the row indices of each of its packs."""

    epoch: int
    packs: tuple[tuple[int, ...], ...]


def sft_steps(
    seed: int,
    lengths: Sequence[int],
    *,
    pack_length: int,
    packs_per_step: int,
    epochs: float,
    max_steps: int | None = None,
) -> list[SftStep]:
    """Every step of an SFT run: each epoch reshuffled, packed in that order, and cut into steps.

    The last step of an epoch may have fewer packs; a fractional epoch is its first packs.
    """
    steps: list[SftStep] = []
    for epoch in range(math.ceil(epochs)):
        if max_steps is not None and len(steps) >= max_steps:
            break
        order = permutation(len(lengths), seed, "sft", epoch)
        bins = first_fit([lengths[i] for i in order], pack_length, max_open=OPEN_PACKS)
        packs = [tuple(order[i] for i in indices) for indices in bins]
        packs = packs[: math.ceil(len(packs) * (epochs - epoch))]
        steps += [
            SftStep(epoch, tuple(packs[i : i + packs_per_step]))
            for i in range(0, len(packs), packs_per_step)
        ]
    return steps[:max_steps]


def order_hash(sample_ids: Sequence[str]) -> str:
    """A short name for a list of rows in their order."""
    digest = hashlib.sha256()
    for sample_id in sample_ids:
        digest.update(sample_id.encode() + b"\x1f")
    return digest.hexdigest()[:16]
