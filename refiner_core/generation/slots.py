"""Which conversation stands in which slot of the cache, and what is cached of it.

In: turns to place, conversations that end. Out: slots. Decides nothing about time; moves the keys
and values of :mod:`refiner_core.generation.slots` and the books about them together.

A slot is *live* (its conversation's turn is being decoded), *parked* (the conversation waits for
tools) or *free*; the tokens of a free slot still stand there, and whoever begins like them copies
them. Live slots come first, so that decoding needs no copy of any.

Memory: slots x columns never exceed ``most_entries`` while more than one slot is left. When
conversations outgrow it, free slots go first, then parked ones (their conversations compute their
context again when they come back), then the last of the live ones (they wait for a slot).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from refiner_core.contract.types import TurnRequest

#: A prefix that is shorter is computed again: a pass through the model costs more.
LEAST_SHARED = 16


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of equal first tokens of two sequences of one type."""
    high = min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    low = 0  # of halves that may differ, compare ever smaller ones: slices compare fast
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


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


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
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
        self._layers = [_SlotLayer(self) for _ in range(layers)]
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


#: Columns come in multiples of this.
COLUMN_BLOCK = 64


@dataclass(eq=False)
class Turn:
    """A turn at work: what it has sampled so far. ``uniforms`` has one number per token."""

    request: TurnRequest
    uniforms: Sequence[float]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def context(self) -> list[int]:
        """All tokens that the next one follows."""
        return [*self.request.context_ids, *self.tokens]


@dataclass(eq=False)
class Slot:
    """One place in the cache. ``ids`` are the tokens whose keys and values stand there."""

    row: int
    ids: list[int] = field(default_factory=list)
    conversation: int | None = None
    turn: Turn | None = None

    @property
    def rank(self) -> int:
        """0 live, 1 parked, 2 free."""
        return 0 if self.turn is not None else 1 if self.conversation is not None else 2


class Slots:
    """The slots, in the order of the cache's rows.

    Parameters
    ----------
    cache
        Empty.
    most
        Slots at most.
    most_entries
        Columns of all slots together, at most.
    """

    def __init__(self, cache: SlotCache, most: int, most_entries: int) -> None:
        self.cache, self._most, self._entries = cache, most, most_entries
        self.rows: list[Slot] = []
        #: By conversation.
        self.of: dict[int, Slot] = {}

    def live(self) -> list[Slot]:
        """Slots whose turn is being decoded, in order."""
        return [slot for slot in self.rows if slot.turn is not None]

    def limit(self) -> int:
        """Number of slots of the present width that memory allows."""
        return max(1, min(self._most, self._entries // max(1, self.cache.columns)))

    def release(self, conversation: int) -> None:
        """It has ended, or gives its slot up; its tokens stay until the slot is taken."""
        slot = self.of.pop(conversation, None)
        if slot is not None:
            slot.conversation = slot.turn = None

    def take(self, turn: Turn, context: list[int], *, evict: bool) -> Slot | None:
        """A slot for a turn: its conversation's own, else a free one, else (``evict``) a parked
        one. None where there is none. Whose tokens stand there already is preferred."""
        conversation = turn.request.conversation
        slot = self.of.get(conversation)
        if slot is None:
            free = [s for s in self.rows if s.rank == 2] or [
                s for s in self.rows if evict and s.rank == 1
            ]
            if not free:
                return None
            slot = max(free, key=lambda s: (common_prefix(s.ids, context), -s.row))
            if slot.conversation is not None:
                self.release(slot.conversation)
            slot.conversation = conversation
            self.of[conversation] = slot
        slot.turn = turn
        return slot

    def longest_known(self, context: list[int], own: int) -> tuple[Slot | None, int]:
        """The slot that begins with most of the context's first tokens (but its last), and how
        many; (None, ``own``) where it is not more than ``own``, or not worth a copy."""
        best, found = None, max(own, LEAST_SHARED - 1)
        for slot in self.rows:
            if slot.ids[: found + 1] == context[: found + 1]:
                length = min(common_prefix(slot.ids, context), len(context) - 1)
                if length > found:
                    best, found = slot, length
        return (best, found) if best is not None else (None, own)

    def fit(self, columns: int, wanted: int) -> list[Turn]:
        """Make room for ``columns`` tokens in each slot, and for ``wanted`` slots if memory allows;
        returns turns that have lost theirs.
        """
        wanted = max(1, min(wanted, self._most))
        width = self.cache.columns
        if columns > width:
            roomy = min(2 * width, self._entries // max(wanted, len(self.rows)))
            width = _blocks(max(columns, roomy // COLUMN_BLOCK * COLUMN_BLOCK))
        elif wanted > self._entries // width:  # those who needed the width may have ended
            used = max([columns, *(len(slot.ids) for slot in self.rows if slot.rank < 2)])
            width = _blocks(used) if 2 * used <= width else width
        count = max(1, min(max(wanted, len(self.rows)), self._entries // width))
        if width == self.cache.columns and count <= len(self.rows):
            return []
        return self._resize(count, width)

    def compact(self, share: float) -> int:
        """Move live slots to the front where more than ``share`` of the places up to the last of
        them are not live; returns that number of places."""
        live = [slot.row for slot in self.rows if slot.turn is not None]
        end = live[-1] + 1 if live else 0
        if end - len(live) <= share * end:
            return end
        holes = [slot for slot in self.rows[: len(live)] if slot.turn is None]
        moved = [slot for slot in self.rows[len(live) :] if slot.turn is not None]
        sources, targets = [slot.row for slot in moved], [slot.row for slot in holes]
        parked = [n for n, slot in enumerate(holes) if slot.conversation is not None]
        sources += [holes[n].row for n in parked]
        targets += [moved[n].row for n in parked]
        end = max(len(slot.ids) for slot in [*moved, *(holes[n] for n in parked)])
        self.cache.copy(sources, targets, 0, end)
        for slot, hole in zip(moved, holes, strict=True):
            slot.row, hole.row = hole.row, slot.row
            self.rows[slot.row], self.rows[hole.row] = slot, hole
            if hole.conversation is None:
                hole.ids = list(slot.ids)  # it was copied from there
        return len(live)

    def _resize(self, count: int, width: int) -> list[Turn]:
        kept = sorted(self.rows, key=lambda slot: slot.rank)  # stable
        lost = [slot.turn for slot in kept[count:] if slot.turn is not None]
        for slot in kept[count:]:
            if slot.conversation is not None:
                self.release(slot.conversation)
        kept = kept[:count]
        self.cache.resize([slot.row for slot in kept], count, width)
        for slot in kept:
            slot.ids = slot.ids[:width]
        self.rows = kept + [Slot(row) for row in range(len(kept), count)]
        for row, slot in enumerate(self.rows):
            slot.row = row
        return lost


def _blocks(columns: int) -> int:
    return -(-columns // COLUMN_BLOCK) * COLUMN_BLOCK
