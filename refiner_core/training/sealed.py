"""Objects that ranks send each other, sealed: nothing is unpickled that another process has made.

In: a group of torch.distributed, and a key that all ranks have in their environment. Out: the
objects. gloo takes a connection of anybody who is fast enough, and torch's own object collectives
unpickle whatever comes over it; here a message without the seal of the key is an error.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from refiner_core.contract.errors import StageFailed

_SEAL_BYTES = hashlib.sha256().digest_size


class SealedGroup:
    """Collectives of objects; all ranks call each of them in the same order."""

    def __init__(self, group: Any, key: bytes) -> None:
        self._group, self._key = group, key

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on all of them."""
        first = dist.get_rank(self._group) == 0
        sent = self._sealed(value) if first else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(sent)])
        dist.broadcast(size, src=0, group=self._group)
        if not first:
            sent = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(sent, src=0, group=self._group)
        return value if first else self._opened(sent)

    def gather(self, value: Any) -> list[Any] | None:
        """Everybody's values in order of rank, on rank 0; None elsewhere."""
        mine, sizes, parts = self._padded(value)
        first = dist.get_rank(self._group) == 0
        dist.gather(mine, parts if first else None, dst=0, group=self._group)
        return self._all_opened(parts, sizes) if first else None

    def all_gather(self, value: Any) -> list[Any]:
        """Everybody's values in order of rank, on all of them."""
        mine, sizes, parts = self._padded(value)
        dist.all_gather(parts, mine, group=self._group)
        return self._all_opened(parts, sizes)

    def _padded(self, value: Any) -> tuple[Tensor, list[int], list[Tensor]]:
        """This rank's message, as long as the longest; all lengths; room for all messages."""
        mine, world = self._sealed(value), dist.get_world_size(self._group)
        told = [torch.empty(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(told, torch.tensor([len(mine)]), group=self._group)
        sizes = [int(size) for size in told]
        mine = torch.nn.functional.pad(mine, (0, max(sizes) - len(mine)))
        return mine, sizes, [torch.empty_like(mine) for _ in range(world)]

    def _all_opened(self, parts: list[Tensor], sizes: list[int]) -> list[Any]:
        return [self._opened(part[:size]) for part, size in zip(parts, sizes, strict=True)]

    def _sealed(self, value: Any) -> Tensor:
        data = pickle.dumps(value)
        seal = hmac.digest(self._key, data, "sha256")
        return torch.frombuffer(bytearray(seal + data), dtype=torch.uint8)

    def _opened(self, message: Tensor) -> Any:
        raw = message.numpy().tobytes()
        seal, data = raw[:_SEAL_BYTES], raw[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, hmac.digest(self._key, data, "sha256")):
            raise StageFailed(
                "A message between training processes was not from a rank of this stage",
                expected="the seal of the key that all ranks of a stage have",
                fix="see who else is on this machine or network; then run the same command again",
            )
        return pickle.loads(data)
