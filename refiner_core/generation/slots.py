"""Which conversation stands in which slot of the cache, and what is cached of it.

In: turns to place, conversations that end. Out: slots. Decides nothing about time; moves the keys
and values of :mod:`refiner_core.generation.slot_cache` and the books about them together.

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

from refiner_core.contract.types import TurnRequest
from refiner_core.generation.prefixes import LEAST_SHARED, common_prefix
from refiner_core.generation.slot_cache import SlotCache

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
        self._of: dict[int, Slot] = {}

    def live(self) -> list[Slot]:
        """Slots whose turn is being decoded, in order."""
        return [slot for slot in self.rows if slot.turn is not None]

    def has(self, conversation: int) -> bool:
        """Whether a conversation has a slot."""
        return conversation in self._of

    def limit(self) -> int:
        """How many slots of the present width memory allows."""
        return max(1, min(self._most, self._entries // max(1, self.cache.columns)))

    def release(self, conversation: int) -> None:
        """It has ended, or gives its slot up; its tokens stay until the slot is taken."""
        slot = self._of.pop(conversation, None)
        if slot is not None:
            slot.conversation = slot.turn = None

    def park(self, slot: Slot) -> None:
        """Its turn is over, its conversation is not."""
        slot.turn = None

    def take(self, turn: Turn, context: list[int], *, evict: bool) -> Slot | None:
        """A slot for a turn: its conversation's own, else a free one, else (``evict``) a parked
        one. None where there is none. Whose tokens stand there already is preferred."""
        conversation = turn.request.conversation
        slot = self._of.get(conversation)
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
            self._of[conversation] = slot
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
