"""Continuous batching: the turns of many conversations on one model, each as soon as it may begin.

In: a desk that hands out turns (:class:`~refiner_core.contract.types.TurnDesk`). Out: completions,
told to the desk, with the log-probabilities of the distribution that was sampled from.

How it runs:

1. Each conversation has a slot in a cache that lives from turn to turn
   (:mod:`refiner_core.generation.slots`). A turn's context extends what is cached; where a repaired
   turn drops tokens, the cache is rolled back to what both have in common.
2. The desk is asked for turns every :data:`STEPS_BETWEEN` steps of decoding, or sooner once an
   eighth of the batch has nothing to do. Turns that begin join by one padded prefill of the tokens
   that are new to them. What new conversations have in common with each other, or with what is
   cached, is computed once and copied: those that would compute the same join one wave later.
3. All live turns decode side by side, one token a step, each with its own parameters and its own
   stream of random numbers. A turn that ends is told to the desk at once; its slot waits, and stops
   being computed once an eighth of the places wait.

Where turns join is counted in steps, so a desk that gives the same answers to the same calls gets
the same bits. Batched otherwise, a turn sees the same random numbers, and log-probabilities that
differ in the last float digits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    TurnDesk,
    TurnRequest,
    Turns,
)
from refiner_core.generation.completions import (
    check_layers,
    check_params,
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
from refiner_core.generation.slots import (
    LEAST_SHARED,
    Pass,
    Slot,
    SlotCache,
    Slots,
    Turn,
    common_prefix,
)

#: Steps of decoding between two looks for turns that may begin.
STEPS_BETWEEN = 4
#: Share of the batch with nothing to do at which one looks sooner, and moves the rest together.
IDLE_SHARE = 1 / 8
#: Tokens of padding in one pass of a prefill; a further pass costs as much.
MOST_PADDING = 256


class TurnDecoding:
    """One call of ``turns`` at work.

    Parameters
    ----------
    model, tokenizer
        In evaluation mode; its tokenizer, for stop strings.
    desk
        Gives turns and takes completions.
    stop_ids
        Tokens that end a turn.
    batch_size
        Most conversations under way.
    on_step
        Called after every step with (turns finished, turns begun).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        desk: TurnDesk,
        stop_ids: frozenset[int],
        *,
        batch_size: int,
        on_step: Callable[[int, int], None] | None = None,
    ) -> None:
        self._model, self._tokenizer, self._desk = model, tokenizer, desk
        self._stop_ids, self._most, self._on_step = stop_ids, batch_size, on_step
        self._config = model.config.get_text_config()
        cache = SlotCache(self._config.num_hidden_layers, model.device, model.dtype)
        self._slots = Slots(cache, batch_size, max_cache_entries(model))
        self._known: set[int] = set()  # conversations that have begun and not ended
        self._waiting: deque[Turn] = deque()  # turns without a slot
        self._begun = self._finished = self._idle = 0

    def run(self) -> None:
        """Work until the desk has no more.

        Raises
        ------
        ConfigurationError
            Parameters make no sense, a context is empty, or exceeds the model's window with the
            turn's new tokens.
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

    # ---- turns that begin

    def _take(self) -> bool:
        """Ask the desk; False once there is nothing more to do."""
        self._idle = 0
        waits = not self._waiting and not self._slots.live()
        turns = self._ask(wait=waits)
        if turns.ended and turns.more:  # there is more room than it knew
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

    def _checked(self, request: TurnRequest) -> Turn:
        params = request.params
        check_params(params)
        window = getattr(self._config, "max_position_embeddings", None)
        asked = GenerationRequest(request.context_ids, request.seed)
        check_layers(self._config, check_window([asked], params, window))
        length = params.max_new_tokens if params.temperature > 0 else 0
        return Turn(request, uniform_streams([request.seed], length)[0].tolist())

    def _join(self) -> None:
        """Give slots to turns that wait, compute what is new to them, and sample their first."""
        if not self._waiting:
            return
        lengths = [len(turn.context()) for turn in self._waiting]
        lengths += [len(slot.ids) for slot in self._slots.live()]
        self._fit(max(lengths) + 1)
        while wave := self._wave():
            self._sample([slot for slot, _ in wave], self._prefill(wave))

    def _wave(self) -> list[tuple[Slot, bool]]:
        """Slots for turns that wait, and whether their conversations are new; but for new ones that
        begin like one of these, and with more than is cached: they copy it in the next wave."""
        wave: list[tuple[Slot, bool]] = []
        heads: list[list[int]] = []
        left: deque[Turn] = deque()
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

    def _prefill(self, wave: Sequence[tuple[Slot, bool]]) -> Tensor:
        """Compute the contexts of slots as far as they are not cached; next-token logits [J, V]."""
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
        self, slots: Sequence[Slot], contexts: Sequence[list[int]], new: Sequence[bool]
    ) -> list[int]:
        """Roll slots back to what their contexts begin with, or copy it from another slot where
        that has more of it; how many tokens each has then."""
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

    def _forward(self, rows: Sequence[tuple[Slot, list[int], int]]) -> Tensor:
        """Compute contexts behind what is known of each; logits [rows, V] behind their ends."""
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
        """One token for every live turn."""
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

    def _places(self) -> list[Slot]:
        """The slots to decode: all live ones, and those between them. What stands in a free one
        behind the longest live one is given up, so that nobody looks that far."""
        rows = self._slots.rows[: self._slots.compact(IDLE_SHARE)]
        longest = max(len(slot.ids) for slot in rows if slot.turn is not None)
        for slot in rows:
            if slot.conversation is None:
                del slot.ids[longest:]
        return rows

    def _run(self, tokens_J_S: Tensor, given: Pass, keep: Tensor | int) -> Tensor:
        """Logits [J, V] behind one token of each row: ``keep`` [J, 1], or the last one."""
        out = self._model(
            input_ids=tokens_J_S.to(self._model.device),
            position_ids=given.positions_J_S,
            attention_mask=given.mask,
            past_key_values=given.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = out.logits[:, 0]
        return logits

    def _sample(self, slots: Sequence[Slot], logits_J_V: Tensor) -> None:
        """Draw a token for each of some live turns, and tell the desk of those that end with it."""
        turns = [slot.turn for slot in slots if slot.turn is not None]
        alike: dict[tuple[float, float, int], list[int]] = {}
        for n, turn in enumerate(turns):
            params = turn.request.params
            alike.setdefault((params.temperature, params.top_p, params.top_k), []).append(n)
        for members in alike.values():
            logits = logits_J_V if len(alike) == 1 else logits_J_V[members]
            self._draw([turns[n] for n in members], logits)
        ended = self._stopped(turns)
        for slot, turn, stopped in zip(slots, turns, ended, strict=True):
            if stopped or len(turn.tokens) == turn.request.params.max_new_tokens:
                slot.turn = None  # its conversation goes on
                self._idle += 1
                self._finished += 1
                reason: Literal["stop", "length"] = "stop" if stopped else "length"
                completion = Completion(tuple(turn.tokens), tuple(turn.logprobs), reason)
                self._desk.finished(turn.request, completion)
        if self._on_step is not None:
            self._on_step(self._finished, self._begun)

    def _draw(self, turns: Sequence[Turn], logits: Tensor) -> None:
        """One token more for each, with its log-probability; all sample alike."""
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

    def _stopped(self, turns: Sequence[Turn]) -> list[bool]:
        """Which turns end with their last token, by itself or by a stop string."""
        stopped = [turn.tokens[-1] in self._stop_ids for turn in turns]
        alike: dict[tuple[str, ...], list[int]] = {}
        for n, turn in enumerate(turns):
            if turn.request.params.stop_strings:
                alike.setdefault(turn.request.params.stop_strings, []).append(n)
        for strings, members in alike.items():
            window = stop_string_window(strings)
            tails = [turns[n].tokens[-window:] for n in members]
            for n, found in zip(
                members, with_stop_string(self._tokenizer, tails, strings), strict=True
            ):
                stopped[n] |= found
        return stopped


def prefill_parts(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of spans that go through the model together: of like lengths, longest first. A part
    holds at most :data:`PREFILL_TOKENS` with padding, and little padding."""
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
