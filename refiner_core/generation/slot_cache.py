"""A key/value cache of conversations: one slot each, that lives from turn to turn.

In: which slots take part in a pass and at which columns their tokens stand. Out: a cache that a
stock transformers model runs with, and the attention mask and positions that go with it.

Column *c* of a slot holds the token at position *c* of its conversation, so a slot is extended,
rolled back and copied by columns. What stands behind a conversation's end is never seen: a query at
position *p* sees the columns up to *p*. The first slots are those that decode, side by side without
a copy (:meth:`SlotCache.decode`); a prefill may name any (:meth:`SlotCache.prefill`).

Shape suffixes: R slots, J slots of a pass, S tokens of each in it, H key/value heads, D head size,
C columns, K columns that a pass looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

#: Columns that are made finite before they are needed, so that it happens rarely.
_AHEAD = 64


class _Pass(NamedTuple):
    """Where a pass reads and writes; ``slots_J`` None: the first J, which need no copy. ``fresh``:
    nothing is cached of any of them, so the pass sees its own tokens alone."""

    slots_J: Tensor | None
    columns_J_S: Tensor
    width: int
    fresh: bool


class Pass(NamedTuple):
    """What the model is given: positions [J, S] and mask [J, 1, S, K] (None: from 0, causal), and
    the cache."""

    positions_J_S: Tensor | None
    mask: Tensor | None
    cache: Cache


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One model layer's keys and values, [R, H, C, D] each."""

    is_sliding = False

    def __init__(self, slots: SlotCache) -> None:
        super().__init__()
        self._slots = slots
        self.is_initialized = True
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store [J, H, S, D] where the pass says; return all that it may look at, [J, H, K, D]."""
        if self.keys is None or self.values is None:
            self.keys = self._slots.storage(key_states, 0)
            self.values = self._slots.storage(value_states, 0)
        return self._stored(self.keys, key_states), self._stored(self.values, value_states)

    def _stored(self, storage: Tensor, states: Tensor) -> Tensor:
        slots_J, columns_J_S, width, fresh = self._slots.now
        rows = torch.arange(len(columns_J_S), device=states.device) if slots_J is None else slots_J
        storage[rows[:, None], :, columns_J_S] = states.transpose(1, 2)
        if fresh:
            return states
        if slots_J is None:
            return storage[: len(columns_J_S), :, :width]
        return storage[:, :, :width].index_select(0, slots_J)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the first update makes the storage."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset) of the pass."""
        return self._slots.now.width, 0

    def get_seq_length(self) -> int:
        """Tokens before the pass, where no mask is given: none."""
        return 0

    def get_max_length(self) -> int:
        """Columns."""
        return self._slots.columns


class SlotCache:
    """The layers; how they grow, and how slots are copied and put in another order.

    Parameters
    ----------
    layers
        How many layers the model has.
    device, dtype
        Of the model.
    """

    def __init__(self, layers: int, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self.count, self.columns = 0, 0
        #: Columns that hold numbers in every slot: what is masked is still multiplied, and must be
        #: finite. The rest is not even touched, so that it costs no memory of the machine.
        self._finite = 0
        self._layers = [SlotLayer(self) for _ in range(layers)]
        self._cache = Cache(layers=self._layers)
        self.now: _Pass

    def resize(self, kept: Sequence[int], count: int, columns: int) -> None:
        """Keep the slots ``kept``, in that order, as the first of ``count`` with ``columns``."""
        index = self._tensor(kept)
        self.count, self.columns = count, columns
        self._finite = used = min(columns, self._finite)

        def resized(old: Tensor) -> Tensor:
            made = self.storage(old, len(kept))
            made[: len(kept), :, :used] = old[:, :, :used].index_select(0, index)
            return made

        for layer in self._layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys = resized(layer.keys)
                layer.values = resized(layer.values)

    def storage(self, like: Tensor, first: int) -> Tensor:
        """Room [R, H, C, D] for what is like [*, H, *, D]; slots from ``first`` on are finite."""
        made = like.new_empty(self.count, like.shape[1], self.columns, like.shape[-1])
        made[first:, :, : self._finite] = 0
        return made

    def _look(self, width: int) -> None:
        """See that the columns of a pass are finite in every slot."""
        if width <= self._finite:
            return
        end = min(self.columns, width + _AHEAD)
        for layer in self._layers:
            for stored in (layer.keys, layer.values):
                if stored is not None:
                    stored[:, :, self._finite : end] = 0
        self._finite = end

    def copy(self, sources: Sequence[int], targets: Sequence[int], first: int, end: int) -> None:
        """Copy columns [first, end) of slots; all sources are read before a target is written."""
        if not targets or end <= first:
            return
        read, write = self._tensor(sources), self._tensor(targets)
        for layer in self._layers:
            for storage in (layer.keys, layer.values):
                if storage is not None:
                    part = storage[:, :, first:end]
                    part.index_copy_(0, write, part.index_select(0, read))

    def decode(self, lengths: Sequence[int]) -> Pass:
        """A pass of one token for each of the first slots, behind ``lengths`` cached ones."""
        columns_J_S = self._tensor(lengths)[:, None]
        width = _rounded(max(lengths) + 1, self.columns)
        self._look(width)
        self.now = _Pass(None, columns_J_S, width, fresh=False)
        return Pass(columns_J_S, self._mask(columns_J_S, width), self._cache)

    def prefill(self, slots: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Pass:
        """A pass of tokens [start, end) of each slot, padded to the longest; what is padded is
        written to the column behind the slot's end, which the next token takes."""
        start_J, end_J = self._tensor(starts), self._tensor(ends)
        longest = max(end - start for start, end in zip(starts, ends, strict=True))
        steps = torch.arange(longest, device=self._device)
        columns_J_S = torch.minimum(start_J[:, None] + steps, end_J[:, None])
        width = _rounded(max(ends) + 1, self.columns)
        self._look(width)
        if not any(starts):
            self.now = _Pass(self._tensor(slots), columns_J_S, longest, fresh=True)
            return Pass(None, None, self._cache)
        self.now = _Pass(self._tensor(slots), columns_J_S, width, fresh=False)
        return Pass(columns_J_S, self._mask(columns_J_S, width), self._cache)

    def _mask(self, columns_J_S: Tensor, width: int) -> Tensor:
        """Additive: 0 is seen, the minimum is not."""
        seen = torch.arange(width, device=self._device) <= columns_J_S[..., None]
        keys = self._layers[0].keys
        dtype = self._dtype if keys is None else keys.dtype  # autocast may have another
        mask = torch.zeros(seen.shape, dtype=dtype, device=self._device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _rounded(width: int, most: int) -> int:
    """Up to a multiple of eight: kernels on GPUs want masks aligned."""
    return min(most, -(-width // 8) * 8)
