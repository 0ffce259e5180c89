"""Continuous batching: turns of many conversations on one model, each started as early as possible.

In: a desk that hands out turns (:class:`~refiner_core.contract.types.TurnScheduler`). Out:
completions, passed to the desk, with the log-probabilities of the sampled distribution.

How it works:

1. Each conversation has a slot in a cache that persists between turns. A turn's context extends
   the cached tokens; if a repaired turn drops tokens, the cache is rolled back to the common
   prefix.
2. The desk is asked for turns every :data:`STEPS_BETWEEN` decoding steps, or earlier once an eighth
   of the batch is idle. New turns join by one padded prefill of their new tokens. Prefixes shared
   by new conversations, or already cached, are computed once and copied: conversations that would
   compute the same prefix join one wave later.
3. All live turns decode in parallel, one token per step, each with its own parameters and its own
   stream of random numbers. A finished turn is reported to the desk immediately; its slot waits,
   and is no longer computed once an eighth of the places wait.

A slot is *live* (its conversation's turn is being decoded), *parked* (the conversation waits for
tools) or *free*; a free slot keeps its tokens, and a new conversation with the same prefix copies
them. Live slots come first, so that decoding needs no copies.

Memory: slots x columns never exceed ``max_cache_entries`` unless only one slot is left. When
conversations outgrow it, free slots are dropped first, then parked ones (their contexts are
recomputed at their next turn), then the last live ones (their turns wait for a slot).

Joining is counted in steps, so a desk that gives the same answers to the same calls gets the same
bits. In other batches a turn sees the same random numbers, and log-probabilities that differ in the
last float digits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    TurnRequest,
    Turns,
    TurnScheduler,
)
from refiner_core.generation.completions import (
    check_layers,
    check_window,
    stop_string_window,
    with_stop_string,
)
from refiner_core.generation.sampling import (
    PREFILL_TOKENS,
    draw,
    max_cache_entries,
    refuse_not_finite,
    uniform_streams,
)

#: A shorter prefix is recomputed: a pass through the model costs more.
LEAST_SHARED = 16


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of equal first tokens of two sequences of one type."""
    high = min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    low = 0  # bisection: slices compare fast
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


class _Pass(NamedTuple):
    """Where a pass reads and writes; ``slots_J`` None: the first J, without copies. ``fresh``:
    nothing is cached for them, so the pass attends to its own tokens only."""

    slots_J: Tensor | None
    columns_J_S: Tensor
    width: int
    fresh: bool


#: Model inputs: positions [J, S] and mask [J, 1, S, K]; None: from 0, causal.
_Given = tuple[Tensor, Tensor] | tuple[None, None]


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One model layer's keys and values, [R, H, C, D] each."""

    is_sliding = False

    def __init__(self, slots: _SlotCache) -> None:
        super().__init__()
        self._slots = slots
        self.is_initialized = True
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store [J, H, S, D] for the pass; return everything it may attend to, [J, H, K, D]."""
        if self.keys is None or self.values is None:
            self.keys = self._slots.storage(key_states)
            self.values = self._slots.storage(value_states)
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
        """Do nothing: the first update creates the storage."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset) of the pass."""
        return self._slots.now.width, 0

    def get_seq_length(self) -> int:
        """Tokens before the pass if no mask is given: none."""
        return 0

    def get_max_length(self) -> int:
        """Columns."""
        return self._slots.columns


class _SlotCache:
    """The layers, with growing, copying and reordering of slots.

    Parameters
    ----------
    layers
        Number of the model's layers.
    device, dtype
        Of the model.
    """

    def __init__(self, layers: int, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self.count, self.columns = 0, 0
        self._layers = [_SlotLayer(self) for _ in range(layers)]
        self.model_cache = Cache(layers=self._layers)
        self.now: _Pass

    def resize(self, kept: Sequence[int], count: int, columns: int) -> None:
        """Keep the slots ``kept``, in that order, as the first of ``count`` with ``columns``."""
        index = self._tensor(kept)
        self.count, self.columns = count, columns

        def resized(old: Tensor) -> Tensor:
            made, used = self.storage(old), min(columns, old.shape[2])
            made[: len(kept), :, :used] = old[:, :, :used].index_select(0, index)
            return made

        for layer in self._layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys = resized(layer.keys)
                layer.values = resized(layer.values)

    def storage(self, like: Tensor) -> Tensor:
        """Zeros [R, H, C, D] for tensors like [*, H, *, D]; masked entries are still multiplied, so
        they must be finite."""
        return like.new_zeros(self.count, like.shape[1], self.columns, like.shape[-1])

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

    def decode(self, lengths: Sequence[int]) -> _Given:
        """A pass of one token for each of the first slots, after ``lengths`` cached ones."""
        columns_J_S = self._tensor(lengths)[:, None]
        width = _rounded(max(lengths) + 1, self.columns)
        self.now = _Pass(None, columns_J_S, width, fresh=False)
        return columns_J_S, self._mask(columns_J_S, width)

    def prefill(self, slots: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> _Given:
        """A pass of tokens [start, end) of each slot, padded to the longest; padding is written to
        the column after the slot's end, where the next token goes."""
        start_J, end_J = self._tensor(starts), self._tensor(ends)
        longest = max(end - start for start, end in zip(starts, ends, strict=True))
        steps = torch.arange(longest, device=self._device)
        columns_J_S = torch.minimum(start_J[:, None] + steps, end_J[:, None])
        width = _rounded(max(ends) + 1, self.columns)
        if not any(starts):
            self.now = _Pass(self._tensor(slots), columns_J_S, longest, fresh=True)
            return None, None
        self.now = _Pass(self._tensor(slots), columns_J_S, width, fresh=False)
        return columns_J_S, self._mask(columns_J_S, width)

    def _mask(self, columns_J_S: Tensor, width: int) -> Tensor:
        """Additive mask: 0 is visible, the minimum is not."""
        seen = torch.arange(width, device=self._device) <= columns_J_S[..., None]
        keys = self._layers[0].keys
        dtype = self._dtype if keys is None else keys.dtype  # autocast may use another
        mask = torch.zeros(seen.shape, dtype=dtype, device=self._device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _rounded(width: int, most: int) -> int:
    """Round up to a multiple of eight: GPU kernels need aligned masks."""
    return min(most, -(-width // 8) * 8)


#: Columns are allocated in multiples of this.
COLUMN_BLOCK = 64


@dataclass(eq=False)
class _Turn:
    """A running turn with its sampled tokens. ``uniforms`` has one number per token."""

    request: TurnRequest
    uniforms: Sequence[float]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def context(self) -> list[int]:
        """All tokens before the next one."""
        return [*self.request.context_ids, *self.tokens]


@dataclass(eq=False)
class _Slot:
    """One place in the cache. ``ids`` are the tokens whose keys and values it holds."""

    row: int
    ids: list[int] = field(default_factory=list)
    conversation: int | None = None
    turn: _Turn | None = None

    @property
    def rank(self) -> int:
        """0 live, 1 parked, 2 free."""
        return 0 if self.turn is not None else 1 if self.conversation is not None else 2


class _Slots:
    """The slots, in the order of the cache's rows.

    Parameters
    ----------
    cache
        Empty.
    most
        Maximum number of slots.
    most_entries
        Maximum columns of all slots together.
    """

    def __init__(self, cache: _SlotCache, most: int, most_entries: int) -> None:
        self.cache, self._most, self._entries = cache, most, most_entries
        self.rows: list[_Slot] = []
        #: By conversation.
        self.of: dict[int, _Slot] = {}

    def live(self) -> list[_Slot]:
        """Slots with a turn being decoded, in order."""
        return [slot for slot in self.rows if slot.turn is not None]

    def limit(self) -> int:
        """Number of slots of the current width that memory allows."""
        return max(1, min(self._most, self._entries // max(1, self.cache.columns)))

    def release(self, conversation: int) -> None:
        """Free a conversation's slot; its tokens stay until the slot is taken."""
        slot = self.of.pop(conversation, None)
        if slot is not None:
            slot.conversation = slot.turn = None

    def take(self, turn: _Turn, context: list[int], *, evict: bool) -> _Slot | None:
        """A slot for a turn: its conversation's own, else a free one, else (``evict``) a parked
        one; None if there is none. Prefers slots that hold the same first tokens."""
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

    def longest_known(self, context: list[int], own: int) -> tuple[_Slot | None, int]:
        """The slot with the longest common prefix with the context (without its last token), and
        its length; (None, ``own``) if that is not above ``own``, or not worth a copy."""
        best, found = None, max(own, LEAST_SHARED - 1)
        for slot in self.rows:
            if slot.ids[: found + 1] == context[: found + 1]:
                length = min(common_prefix(slot.ids, context), len(context) - 1)
                if length > found:
                    best, found = slot, length
        return (best, found) if best is not None else (None, own)

    def fit(self, columns: int, wanted: int) -> list[_Turn]:
        """Provide ``columns`` tokens in each slot, and ``wanted`` slots if memory allows;
        returns turns that lost their slot.
        """
        wanted = max(1, min(wanted, self._most))
        width = self.cache.columns
        if columns > width:
            roomy = min(2 * width, self._entries // max(wanted, len(self.rows)))
            width = _blocks(max(columns, roomy // COLUMN_BLOCK * COLUMN_BLOCK))
        elif wanted > self._entries // width:  # turns that needed the width may have ended
            used = max([columns, *(len(slot.ids) for slot in self.rows if slot.rank < 2)])
            width = _blocks(used) if 2 * used <= width else width
        count = max(1, min(max(wanted, len(self.rows)), self._entries // width))
        if width == self.cache.columns and count <= len(self.rows):
            return []
        return self._resize(count, width)

    def compact(self, share: float) -> int:
        """Move live slots to the front if more than ``share`` of the places up to the last of
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
                hole.ids = list(slot.ids)  # copied from there
        return len(live)

    def _resize(self, count: int, width: int) -> list[_Turn]:
        kept = sorted(self.rows, key=lambda slot: slot.rank)  # stable
        lost = [slot.turn for slot in kept[count:] if slot.turn is not None]
        for slot in kept[count:]:
            if slot.conversation is not None:
                self.release(slot.conversation)
        kept = kept[:count]
        self.cache.resize([slot.row for slot in kept], count, width)
        for slot in kept:
            slot.ids = slot.ids[:width]
        self.rows = kept + [_Slot(row) for row in range(len(kept), count)]
        for row, slot in enumerate(self.rows):
            slot.row = row
        return lost


def _blocks(columns: int) -> int:
    return -(-columns // COLUMN_BLOCK) * COLUMN_BLOCK


#: Decoding steps between two requests for turns.
STEPS_BETWEEN = 4
#: Idle share of the batch that triggers an earlier request, and compaction.
IDLE_SHARE = 1 / 8
#: Padding tokens in one pass of a prefill; beyond that a further pass is cheaper.
MOST_PADDING = 256


class TurnDecoding:
    """One call of ``turns``.

    Parameters
    ----------
    model, tokenizer
        In evaluation mode; its tokenizer, for stop strings.
    desk
        Source of turns and destination of completions.
    stop_ids
        Tokens that end a turn.
    batch_size
        Maximum number of running conversations.
    on_step
        Called after every step with (turns finished, turns started).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        desk: TurnScheduler,
        stop_ids: frozenset[int],
        *,
        batch_size: int,
        on_step: Callable[[int, int], None] | None = None,
    ) -> None:
        self._model, self._tokenizer, self._desk = model, tokenizer, desk
        self._stop_ids, self._most, self._on_step = stop_ids, batch_size, on_step
        self._config = model.config.get_text_config()
        cache = _SlotCache(self._config.num_hidden_layers, model.device, model.dtype)
        self._slots = _Slots(cache, batch_size, max_cache_entries(model))
        self._known: set[int] = set()  # conversations started and not ended
        self._waiting: deque[_Turn] = deque()  # turns without a slot
        self._begun = self._finished = self._idle = 0

    def run(self) -> None:
        """Work until the desk has no more turns.

        Raises
        ------
        ConfigurationError
            A context with the turn's new tokens exceeds the model's window.
        UnsupportedError
            The model has layers that this backend cannot decode.
        StageFailed
            The model's logits are not finite.
        """
        while self._take():
            self._join()
            for _ in range(STEPS_BETWEEN):
                live = len(self._slots.live())
                if not live or self._idle > IDLE_SHARE * (live + self._idle):
                    break
                self._step()

    # ---- new turns

    def _take(self) -> bool:
        """Ask the desk for turns; False once there is nothing more to do."""
        self._idle = 0
        waits = not self._waiting and not self._slots.live()
        turns = self._ask(wait=waits)
        if turns.ended and turns.more:  # more slots are free than the request said
            self._ask(wait=False)
        return bool(self._waiting or turns.more or not waits)

    def _ask(self, *, wait: bool) -> Turns:
        room = min(self._most, self._slots.limit()) - len(self._known)
        turns = self._desk.take(max(0, room), wait=wait)
        for conversation in turns.ended:
            self._known.discard(conversation)
            self._slots.release(conversation)
        for request in turns.begin:
            self._known.add(request.conversation)
            self._waiting.append(self._checked(request))
        self._begun += len(turns.begin)
        return turns

    def _checked(self, request: TurnRequest) -> _Turn:
        params = request.params
        window = getattr(self._config, "max_position_embeddings", None)
        asked = GenerationRequest(request.context_ids, request.seed)
        check_layers(self._config, check_window([asked], params, window))
        length = params.max_new_tokens if params.temperature > 0 else 0
        return _Turn(request, uniform_streams([request.seed], length)[0].tolist())

    def _join(self) -> None:
        """Assign slots to waiting turns, compute their new tokens, and sample their first."""
        if not self._waiting:
            return
        lengths = [len(turn.context()) for turn in self._waiting]
        lengths += [len(slot.ids) for slot in self._slots.live()]
        self._fit(max(lengths) + 1)
        while wave := self._wave():
            self._sample([slot for slot, _ in wave], self._prefill(wave))

    def _wave(self) -> list[tuple[_Slot, bool]]:
        """Slots for waiting turns, and whether their conversations are new. New ones that share
        with one of these a longer prefix than is cached wait for the next wave, and copy it."""
        wave: list[tuple[_Slot, bool]] = []
        heads: list[list[int]] = []
        left: deque[_Turn] = deque()
        for turn in self._waiting:
            context, new = turn.context(), turn.request.conversation not in self._slots.of
            shared = max((common_prefix(context, head) for head in heads), default=0) if new else 0
            if shared >= self._slots.longest_known(context, 0)[1] + LEAST_SHARED:
                left.append(turn)
                continue
            evict = not wave and not self._slots.live()
            slot = self._slots.take(turn, context, evict=evict)
            if slot is None:
                left.append(turn)
                continue
            wave.append((slot, new))
            if new:
                heads.append(context)
        self._waiting = left
        return wave

    def _fit(self, columns: int) -> None:
        self._waiting.extendleft(reversed(self._slots.fit(columns, len(self._known))))

    def _prefill(self, wave: Sequence[tuple[_Slot, bool]]) -> Tensor:
        """Compute the uncached parts of the slots' contexts; next-token logits [J, V]."""
        slots = [slot for slot, _ in wave]
        contexts = [slot.turn.context() for slot in slots if slot.turn is not None]
        known = self._copy_known(slots, contexts, [new for _, new in wave])
        parts = prefill_parts([len(c) - n for c, n in zip(contexts, known, strict=True)])
        logits = [
            self._forward([(slots[n], contexts[n], known[n]) for n in part]) for part in parts
        ]
        for slot, context in zip(slots, contexts, strict=True):
            slot.ids = context
        return torch.cat(logits)[np.argsort([n for part in parts for n in part])]

    def _copy_known(
        self, slots: Sequence[_Slot], contexts: Sequence[list[int]], new: Sequence[bool]
    ) -> list[int]:
        """Roll slots back to the common prefix with their contexts, or copy a longer one from
        another slot; returns the number of cached tokens of each."""
        known, sources, targets = [], [], []
        for slot, context, is_new in zip(slots, contexts, new, strict=True):
            length = min(common_prefix(slot.ids, context), len(context) - 1)
            if is_new:
                source, length = self._slots.longest_known(context, length)
                if source is not None:
                    sources.append(source.row)
                    targets.append((slot.row, length))
            known.append(length)
        end = max((length for _, length in targets), default=0)
        self._slots.cache.copy(sources, [row for row, _ in targets], 0, end)
        for slot, context, length in zip(slots, contexts, known, strict=True):
            slot.ids = context[:length]
        return known

    def _forward(self, rows: Sequence[tuple[_Slot, list[int], int]]) -> Tensor:
        """Compute contexts after their known prefixes; logits [rows, V] after their ends."""
        given = self._slots.cache.prefill(
            [slot.row for slot, _, _ in rows],
            [known for _, _, known in rows],
            [len(context) for _, context, _ in rows],
        )
        tokens = [context[known:] for _, context, known in rows]
        longest = max(map(len, tokens))
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in tokens])
        last = torch.tensor([[len(ids) - 1] for ids in tokens], device=self._model.device)
        return self._run(padded, given, last)

    # ---- decoding

    def _step(self) -> None:
        """Decode one token for every live turn."""
        rows = self._places()
        self._fit(max(len(slot.ids) for slot in rows) + 1)
        rows = self._places()
        live = [n for n, slot in enumerate(rows) if slot.turn is not None]
        tokens = [0 if slot.turn is None else slot.turn.tokens[-1] for slot in rows]
        given = self._slots.cache.decode([len(slot.ids) for slot in rows])
        logits = self._run(torch.tensor(tokens)[:, None], given, 0)
        for n in live:
            rows[n].ids.append(tokens[n])
        if len(live) < len(rows):
            logits = logits[live]
        self._sample([rows[n] for n in live], logits)

    def _places(self) -> list[_Slot]:
        """The slots to decode: all live ones, and those between them. Tokens of a free slot beyond
        the longest live one are dropped, so that the pass stays short."""
        rows = self._slots.rows[: self._slots.compact(IDLE_SHARE)]
        longest = max(len(slot.ids) for slot in rows if slot.turn is not None)
        for slot in rows:
            if slot.conversation is None:
                del slot.ids[longest:]
        return rows

    def _run(self, tokens_J_S: Tensor, given: _Given, keep: Tensor | int) -> Tensor:
        """Logits [J, V] after one token of each row: ``keep`` [J, 1], or the last one."""
        out = self._model(
            input_ids=tokens_J_S.to(self._model.device),
            position_ids=given[0],
            attention_mask=given[1],
            past_key_values=self._slots.cache.model_cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = out.logits[:, 0]
        return logits

    def _sample(self, slots: Sequence[_Slot], logits_J_V: Tensor) -> None:
        """Draw a token for each of some live turns, and report finished turns to the desk."""
        turns = [slot.turn for slot in slots if slot.turn is not None]
        alike: dict[tuple[Any, ...], list[int]] = {}
        for n, turn in enumerate(turns):
            params = turn.request.params
            key = (params.temperature, params.top_p, params.top_k, params.stop_strings)
            alike.setdefault(key, []).append(n)
        ended = [False] * len(turns)
        for members in alike.values():
            logits = logits_J_V if len(alike) == 1 else logits_J_V[members]
            for n, stopped in zip(
                members, self._draw([turns[n] for n in members], logits), strict=True
            ):
                ended[n] = stopped
        for slot, turn, stopped in zip(slots, turns, ended, strict=True):
            if stopped or len(turn.tokens) == turn.request.params.max_new_tokens:
                slot.turn = None  # its conversation continues
                self._idle += 1
                self._finished += 1
                reason: Literal["stop", "length"] = "stop" if stopped else "length"
                completion = Completion(tuple(turn.tokens), tuple(turn.logprobs), reason)
                self._desk.finished(turn.request, completion)
        if self._on_step is not None:
            self._on_step(self._finished, self._begun)

    def _draw(self, turns: Sequence[_Turn], logits: Tensor) -> list[bool]:
        """Draw one more token for each, with its log-probability; all use the same parameters.
        Returns which turns end with it, by a token or by a stop string."""
        params = turns[0].request.params
        greedy = params.temperature == 0
        uniforms = [0.0 if greedy else turn.uniforms[len(turn.tokens)] for turn in turns]
        tokens_N, logprobs_N = draw(
            logits, torch.tensor(uniforms, dtype=torch.float64, device=logits.device), params
        )
        logprobs = logprobs_N.cpu().numpy()
        refuse_not_finite(logprobs, np.array([len(turn.tokens) for turn in turns]))
        for turn, token, logprob in zip(turns, tokens_N.tolist(), logprobs.tolist(), strict=True):
            turn.tokens.append(token)
            turn.logprobs.append(logprob)
        strings = params.stop_strings
        found = [False] * len(turns)
        if strings:
            window = stop_string_window(strings)
            tails = [turn.tokens[-window:] for turn in turns]
            found = with_stop_string(self._tokenizer, tails, strings)
        return [
            f or turn.tokens[-1] in self._stop_ids for f, turn in zip(found, turns, strict=True)
        ]


def prefill_parts(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of spans that go through the model together: of similar lengths, longest first. A
    part holds at most :data:`PREFILL_TOKENS` with padding, and little padding."""
    parts: list[list[int]] = []
    padding = longest = 0
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        padding += longest - lengths[n]
        full = parts and (len(parts[-1]) + 1) * longest > PREFILL_TOKENS
        if not parts or full or padding > MOST_PADDING:
            parts.append([])
            padding, longest = 0, lengths[n]
        parts[-1].append(n)
    return parts
