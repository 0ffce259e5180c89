"""Copies of a training state in host memory, into the same memory every time.

In: tensors, by name. Out: copies that later steps do not change.

Most of the time of a copy into new memory goes into getting that memory from the system, page by
page: on a CPU it takes 5 to 10 times as long as a copy into memory that was used before. So the
memory of one copy of a state is kept for the next one, unless somebody still holds the former;
tensors of a GPU go into pinned memory. The price is host memory of the size of the state, from the
first copy to the end of the stage.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch


class HostCopies:
    """Memory for copies of one state: :meth:`begin`, :meth:`copy` each tensor, :meth:`lend`."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        self._used: dict[str, Any] = {}
        self._holder: weakref.ref[Any] | None = None

    def begin(self) -> None:
        """Begin a copy of a whole state. What the former one used serves again, if whoever had it
        is gone."""
        lent = self._holder is not None and self._holder() is not None
        self._kept = {} if lent else {**self._kept, **self._used}
        self._used, self._holder = {}, None

    def copy(self, name: str, tensor: Any) -> Any:
        """A copy in host memory, contiguous; finished when this returns."""
        found = self._kept.pop(name, None)
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            found = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._used[name] = found
        return found.copy_(tensor.detach())

    def lend(self, holder: Any) -> None:
        """Leave the memory of this copy alone as long as ``holder`` lives."""
        self._kept = {}
        self._holder = weakref.ref(holder)
