"""The batches of one optimiser step that this rank goes through, as often as it has to.

In: the step's samples, the same on every rank. Out: this rank's share of them as batches on its
device, equally many on every rank (:mod:`refiner_core.training.batches.shares`).

Old policy, reference and update go over the same batches, so those that fit into a small budget of
memory are kept instead of being laid out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from refiner_core.training.batches.packing import Batch, Pack, Sample, collate, to_device
from refiner_core.training.batches.shares import packs_of_ranks
from refiner_core.training.engines.protocol import Engine

#: Bytes of batches that are kept for the next pass.
KEPT_BYTES = 256 << 20


class StepBatches:
    """Iterates over this rank's batches of ``per_pass`` packs; ``packs`` counts all ranks'."""

    def __init__(
        self, engine: Engine, samples: Sequence[Sample], pack_length: int, per_pass: int
    ) -> None:
        self.engine = engine
        every = packs_of_ranks(
            *(samples, engine.ranks.world),
            pack_length=pack_length,
            share_prompts=engine.share_prompts,
            balance=engine.balance,
            multiple_of=per_pass,
        )
        self.packs = sum(1 for packs in every for pack in packs if pack.source_T)
        mine = every[engine.ranks.rank]
        self._parts = [mine[i : i + per_pass] for i in range(0, len(mine), per_pass)]
        self._kept: list[Batch] = []
        self._room = KEPT_BYTES

    def __iter__(self) -> Iterator[Batch]:
        for i, packs in enumerate(self._parts):
            if i < len(self._kept):
                yield self._kept[i]
                continue
            batch = self._collated(packs)
            self._room -= _bytes(batch)
            if self._room >= 0:
                self._kept.append(batch)
            yield batch

    def merged(self, flat_F: torch.Tensor) -> torch.Tensor:
        """Flat values that every rank has for its own targets, put together on all of them."""
        at = torch.cat([batch.flat_T for batch in self]).cpu().numpy()
        parts = self.engine.ranks.gather((at, flat_F.cpu().numpy()[at]))
        whole = None
        if parts is not None:
            whole = np.zeros(len(flat_F), dtype=np.float32)
            for places, values in parts:
                whole[places] = values
        return torch.from_numpy(self.engine.ranks.broadcast(whole)).to(flat_F.device)

    def _collated(self, packs: Sequence[Pack]) -> Batch:
        batch = collate(packs, pad_id=self.engine.pad_id, balance=self.engine.balance)
        return to_device(batch, self.engine.device)


def _bytes(batch: Batch) -> int:
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)
