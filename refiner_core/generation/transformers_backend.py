"""Sampling of completions from a live transformers model, without further services.

In: requests (prompt ids and a seed each) and sampling parameters. Out: completions in the order of
the requests, with the log-probabilities of the sampled distribution.

How a call works:

1. Requests with the same prompt form rows; rows with similar shapes form batches
   (:mod:`refiner_core.generation.sampling`).
2. Each row's prompt goes through the model once, padded on the right: a causal model never attends
   to the right, so no mask is needed; the padding is masked during decoding.
3. All samples of a row decode in parallel over one shared cache.
4. A finished sample is returned immediately, and leaves the batch once that makes it a quarter
   smaller.

A model with recurrent layers has one sample per row and its own cache; prompts are padded on the
left, which its layers skip.

The same requests in the same order give the same bits with the same weights, threads and device.
In other batches a sample sees the same random numbers, and log-probabilities that differ in the
last float digits, since sums are taken in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
)

from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    OnCompletion,
    SamplingParams,
    TurnScheduler,
)
from refiner_core.generation.completions import (
    LockstepTurns,
    check_layers,
    check_window,
    stop_ids,
    stop_string_window,
    with_stop_string,
)
from refiner_core.generation.sampling import (
    MAX_SAMPLES_PER_ROW,
    PREFILL_TOKENS,
    SamplingRow,
    draw,
    max_cache_entries,
    place_samples,
    plan_batches,
    refuse_not_finite,
    uniform_streams,
)


class _SharedPromptLayer(CacheLayerMixin):  # type: ignore[misc]
    """One model layer's keys and values, [P, H, C, D] each; ``used`` entries are filled."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, used: int) -> None:
        super().__init__()
        self.keys, self.values, self.used = keys, values, used
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append one token per sample, [P, H, G, D]; return all entries so far (views)."""
        end = self.used + key_states.shape[2]
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the entries of the prompts exist from the start."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset) of a step with ``query_length`` samples per row."""
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        """Filled entries of a row, all samples together (not a position in the text)."""
        return self.used

    def get_max_length(self) -> int:
        """Capacity in entries."""
        return int(self.keys.shape[2])


class _SharedPromptCache:
    """The layers and the mask, with shrinking to the live samples.

    Parameters
    ----------
    prompts
        Per model layer, pieces of keys and values of the prompts, [rows, H, >= longest prompt, D],
        padded on the right with finite numbers. Emptied during construction, so that the prompts
        are never in memory twice.
    prompt_lengths_P
        Tokens of each row's prompt.
    samples
        G.
    capacity
        Allocated tokens per sample; unused ones are not touched.
    """

    def __init__(
        self,
        prompts: list[list[tuple[Tensor, Tensor]]],
        prompt_lengths_P: Tensor,
        samples: int,
        capacity: int,
    ) -> None:
        self.prompt_lengths_P = prompt_lengths_P
        self.samples, self.tokens, self.capacity = samples, 0, capacity
        self.prompt_length = int(prompt_lengths_P.max())
        layers = []
        for pieces in prompts:
            keys, values = (self._with_room(part) for part in zip(*pieces, strict=True))
            layers.append(_SharedPromptLayer(keys, values, self.prompt_length))
            pieces.clear()
        self.cache = Cache(layers=layers)
        self._mask = self._full_mask()

    def _with_room(self, pieces: Sequence[Tensor]) -> Tensor:
        """Copy pieces [rows, H, >= prompt, D] into storage for ``capacity`` tokens per sample."""
        _, heads, _, size = pieces[0].shape
        room = self.prompt_length + self.capacity * self.samples
        storage = pieces[0].new_empty(sum(map(len, pieces)), heads, room, size)
        for rows, piece in zip(storage.split([*map(len, pieces)]), pieces, strict=True):
            rows[:, :, : self.prompt_length] = piece[:, :, : self.prompt_length]
        return storage

    def _full_mask(self) -> Tensor:
        """Additive mask of the full capacity, [P, 1, G, C]: 0 is visible, the minimum is not."""
        keys = self.cache.layers[0].keys
        device, dtype = keys.device, keys.dtype
        own = torch.eye(self.samples, dtype=torch.bool, device=device).repeat(1, self.capacity)
        slots = torch.arange(self.prompt_length, device=device)
        prompt = slots[None, None] < self.prompt_lengths_P.to(device)[:, None, None]
        rows = len(self.prompt_lengths_P)
        seen = torch.cat(
            (prompt.expand(-1, self.samples, -1), own[None].expand(rows, -1, -1)), dim=-1
        )
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

    def step(self) -> tuple[Cache, Tensor]:
        """The cache and the mask [P, 1, G, keys] for decoding one more token per sample."""
        self.tokens += 1
        return self.cache, self._mask[..., : self.prompt_length + self.tokens * self.samples]

    def keep(self, rows_P: Tensor, columns_P_G: Tensor) -> None:
        """Continue with some samples only.

        Parameters
        ----------
        rows_P
            Old row of each new row.
        columns_P_G
            Old column, in that old row, of each new sample. An empty place may name any column.
        """
        old_samples, old_length = self.samples, self.prompt_length
        self.samples = columns_P_G.shape[1]
        self.prompt_lengths_P = self.prompt_lengths_P[rows_P]
        self.prompt_length = int(self.prompt_lengths_P.max())
        filled = old_length + self.tokens * old_samples
        used = self.prompt_length + self.tokens * self.samples

        def select(entries: Tensor) -> Tensor:
            kept = entries[rows_P]
            rows, heads, _, size = kept.shape
            own = kept[:, :, old_length:filled]
            own = own.unflatten(2, (self.tokens, old_samples))
            index = columns_P_G[:, None, None, :, None].expand(-1, heads, self.tokens, -1, size)
            storage = kept.new_empty(
                rows, heads, self.prompt_length + self.capacity * self.samples, size
            )
            storage[:, :, : self.prompt_length] = kept[:, :, : self.prompt_length]
            storage[:, :, self.prompt_length : used] = own.gather(3, index).flatten(2, 3)
            return storage

        for layer in self.cache.layers:
            layer.keys, layer.values, layer.used = select(layer.keys), select(layer.values), used
        self._mask = self._full_mask()


class _RowCache:
    """The model's own cache with one sample per row, and the mask of its prompts' padding.

    Parameters
    ----------
    caches
        Of some rows each, equally long.
    seen_P_K
        1 at the prompts' tokens, 0 at the padding on their left.
    """

    def __init__(self, caches: Sequence[Cache], seen_P_K: Tensor) -> None:
        self.cache = _joined(caches)
        self._seen_P_K = seen_P_K
        self.prompt_lengths_P = seen_P_K.sum(-1)

    def step(self) -> tuple[Cache, Tensor]:
        """The cache and the mask [P, keys] for decoding one more token per sample."""
        self._seen_P_K = torch.nn.functional.pad(self._seen_P_K, (0, 1), value=1)
        return self.cache, self._seen_P_K

    def keep(self, rows_P: Tensor, _: Tensor) -> None:
        """Continue with some rows only."""
        self.cache.reorder_cache(rows_P)
        self._seen_P_K = self._seen_P_K[rows_P]
        self.prompt_lengths_P = self.prompt_lengths_P[rows_P]


def _joined(caches: Sequence[Cache]) -> Cache:
    """Caches of some rows each as one cache of all rows."""
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        parts = [vars(layer) for layer in layers]
        for name in ("keys", "values"):
            if isinstance(parts[0].get(name), Tensor):
                setattr(layers[0], name, torch.cat([part[name] for part in parts]))
        for name in ("conv_states", "recurrent_states"):
            for number, state in parts[0].get(name, {}).items():
                if state is not None:
                    parts[0][name][number] = torch.cat([part[name][number] for part in parts])
    return caches[0]


#: Finished samples are dropped once the batch then has at most this share of its places.
SHRINK_TO = 0.75


class TransformersGenerator:
    """A :class:`~refiner_core.contract.types.Generator` over a Hugging Face causal language model.

    Uses the model's weights at the time of a call, in evaluation mode and without gradients, and
    restores the model's mode. Attention runs through SDPA if the model's own kernel takes no mask
    (FlashAttention).

    Parameters
    ----------
    model
        Any causal model of transformers whose layers attend to all earlier tokens or have a
        recurrent state.
    tokenizer
        The model's tokenizer: its end-of-text token, and text for stop strings.
    batch_size
        Largest number of samples decoded together.
    on_step
        Called after every decoded token with (samples finished, samples requested): a sign of life
        in calls that take minutes.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch_size: int = 256,
        on_step: Callable[[int, int], None] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.on_step = on_step
        self.stop_ids = stop_ids(model, tokenizer)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        """Sample one completion per request, in order.

        ``on_completion(index, completion)`` is called for each as soon as it is finished, while
        others of its batch continue; it does not affect the samples.

        Raises
        ------
        ConfigurationError
            Prompt and new tokens together exceed the model's window.
        UnsupportedError
            The model has layers that this backend cannot decode.
        StageFailed
            The model's logits are not finite.
        """
        if not requests:
            return []
        self._check_lengths(requests, params)
        completions: dict[int, Completion] = {}
        recurrent = _is_recurrent(self.model)
        with _ready(self.model):
            for batch in plan_batches(
                requests,
                self.batch_size,
                max_new_tokens=params.max_new_tokens,
                max_entries=max_cache_entries(self.model),
                samples_per_row=1 if recurrent else MAX_SAMPLES_PER_ROW,
            ):
                seeds = [requests[index].seed for row in batch for index in row.requests]
                kind = _RowDecoding if recurrent else _Decoding
                decoding = kind(self, batch, seeds, params)
                for finished in decoding.steps():
                    completions.update(finished)
                    if on_completion is not None:
                        for index, completion in finished.items():
                            on_completion(index, completion)
                    if self.on_step is not None:
                        self.on_step(len(completions), len(requests))
        return [completions[index] for index in range(len(requests))]

    def turns(self, desk: TurnScheduler) -> None:
        """Sample the turns of conversations by continuous batching, each started as early as
        possible.

        At most ``batch_size`` conversations run at a time; see
        :mod:`refiner_core.generation.turns`. Raises the errors of :meth:`generate` and of the desk.
        """
        from refiner_core.generation.turns import TurnDecoding

        if _is_recurrent(self.model):
            LockstepTurns(self, room=self.batch_size).turns(desk)
            return
        with _ready(self.model):
            TurnDecoding(
                *(self.model, self.tokenizer, desk, self.stop_ids),
                batch_size=self.batch_size,
                on_step=self.on_step,
            ).run()

    def _check_lengths(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> None:
        config = self.model.config.get_text_config()
        window = getattr(config, "max_position_embeddings", None)
        longest = check_window(requests, params, window)
        check_layers(config, longest)


def _is_recurrent(model: Any) -> bool:
    """Whether a layer's cache is a recurrent state."""
    layers = DynamicCache(config=model.config).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


@contextmanager
def _ready(model: Any) -> Iterator[None]:
    """Evaluation mode, no gradients, an attention kernel with masks; restored afterwards."""
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    if attention not in ("sdpa", "eager"):
        model.config._attn_implementation = "sdpa"
    try:
        # Not inference_mode: rotary embeddings may keep a tensor that training needs later.
        with torch.no_grad():
            yield
    finally:
        model.config._attn_implementation = attention
        model.train(training)


class _Decoding:
    """One running batch. Shape suffixes: N samples of the batch, T tokens, P rows, G per row, V.

    ``grid_P_G`` has the number within the batch of the sample at each place, or -1 if the place is
    empty or finished.
    """

    def __init__(
        self,
        generator: TransformersGenerator,
        batch: Sequence[SamplingRow],
        seeds: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self.model, self.tokenizer = generator.model, generator.tokenizer
        self.stop_ids = np.array(sorted(generator.stop_ids), dtype=np.int64)
        self.batch, self.params = batch, params
        self.device = self.model.device
        self.names = [index for row in batch for index in row.requests]
        count, limit = len(seeds), params.max_new_tokens
        self.uniforms = uniform_streams(seeds, limit if params.temperature > 0 else 1)
        self.tokens_N_T = np.zeros((count, limit), dtype=np.int64)
        self.logprobs_N_T = np.zeros((count, limit), dtype=np.float32)
        self.lengths_N = np.zeros(count, dtype=np.int64)
        self.stopped_N = np.zeros(count, dtype=bool)
        self.grid_P_G = place_samples(batch)

    def steps(self) -> Iterator[dict[int, Completion]]:
        """Decode to the end; yields the samples finished by each token, by index of the request."""
        logits_P_V, cache = self._prefill()
        logits_P_G_V = logits_P_V[:, None].expand(-1, self.grid_P_G.shape[1], -1)
        for step in range(self.params.max_new_tokens):
            finished = self._sample(logits_P_G_V, step)
            yield {self.names[n]: self._completion(n) for n in finished}
            if not (self.grid_P_G >= 0).any():
                return
            self._shrink(cache)
            logits_P_G_V = self._forward(cache, step)

    def _completion(self, n: int) -> Completion:
        """A finished sample, by its number within the batch."""
        length = self.lengths_N[n]
        return Completion(
            token_ids=tuple(self.tokens_N_T[n, :length].tolist()),
            logprobs=tuple(self.logprobs_N_T[n, :length].tolist()),
            finish_reason="stop" if self.stopped_N[n] else "length",
        )

    def _prefill(self) -> tuple[Tensor, _SharedPromptCache | _RowCache]:
        """Next-token logits [P, V] and cache of all prompts, some rows at a time."""
        lengths = torch.tensor([len(row.prompt_ids) for row in self.batch], device=self.device)
        longest = int(lengths.max())
        logits = []
        pieces: list[list[tuple[Tensor, Tensor]]] = []
        rows_at_once = max(1, PREFILL_TOKENS // longest)
        for first in range(0, len(self.batch), rows_at_once):
            part = self.batch[first : first + rows_at_once]
            padded = torch.zeros((len(part), longest), dtype=torch.int64)
            for place, row in enumerate(part):
                padded[place, : len(row.prompt_ids)] = torch.tensor(row.prompt_ids)
            out = self.model(
                input_ids=padded.to(self.device),
                use_cache=True,
                logits_to_keep=lengths[first : first + rows_at_once, None] - 1,
            )
            logits.append(out.logits[:, 0])
            layers = out.past_key_values.layers
            pieces = pieces or [[] for _ in layers]
            for known, layer in zip(pieces, layers, strict=True):
                known.append((layer.keys, layer.values))
            del out, layers
        shape = (self.grid_P_G.shape[1], self.params.max_new_tokens)
        return torch.cat(logits), _SharedPromptCache(pieces, lengths, *shape)

    def _forward(self, cache: _SharedPromptCache | _RowCache, step: int) -> Tensor:
        """Run the newest token of every sample; logits [P, G, V] of the next."""
        newest = self.tokens_N_T[np.maximum(self.grid_P_G, 0), step]
        positions = cache.prompt_lengths_P[:, None].expand(newest.shape) + step
        layers, mask = cache.step()
        out = self.model(
            input_ids=torch.from_numpy(newest).to(self.device),
            position_ids=positions,
            attention_mask=mask,
            past_key_values=layers,
            use_cache=True,
        )
        logits: Tensor = out.logits
        return logits

    def _sample(self, logits_P_G_V: Tensor, step: int) -> list[int]:
        """Draw a token for every live sample, store it, and retire finished samples.

        Returns the finished samples, by number within the batch.
        """
        rows, columns = np.nonzero(self.grid_P_G >= 0)
        live = self.grid_P_G[rows, columns]
        logits = logits_P_G_V[torch.from_numpy(rows), torch.from_numpy(columns)]
        uniforms = self.uniforms[live, min(step, self.uniforms.shape[1] - 1)]
        drawn = draw(logits, torch.from_numpy(uniforms).to(self.device), self.params)
        tokens, logprobs = (values_N.cpu().numpy() for values_N in drawn)
        refuse_not_finite(logprobs, step)
        self.tokens_N_T[live, step] = tokens
        self.logprobs_N_T[live, step] = logprobs
        self.lengths_N[live] = step + 1
        ended = np.isin(tokens, self.stop_ids) | self._ends_with_stop_string(live, step)
        self.stopped_N[live[ended]] = True
        if step + 1 == self.params.max_new_tokens:
            ended[:] = True
        self.grid_P_G[rows[ended], columns[ended]] = -1
        finished: list[int] = live[ended].tolist()
        return finished

    def _ends_with_stop_string(self, live: np.ndarray[Any, Any], step: int) -> np.ndarray[Any, Any]:
        """Which live samples just completed a stop string. Shape [len(live)], bool."""
        strings = self.params.stop_strings
        if not strings:
            return np.zeros(len(live), dtype=bool)
        first = max(0, step + 1 - stop_string_window(strings))
        tails = self.tokens_N_T[live, first : step + 1].tolist()
        return np.array(with_stop_string(self.tokenizer, tails, strings))

    def _shrink(self, cache: _SharedPromptCache | _RowCache) -> None:
        """Drop finished samples if the batch becomes much smaller."""
        alive = self.grid_P_G >= 0
        rows = np.nonzero(alive.any(axis=1))[0]
        width = int(alive.sum(axis=1).max())
        if len(rows) * width > SHRINK_TO * alive.size:
            return
        # Stable: live samples move to the front of their row, in order.
        columns = np.argsort(~alive[rows], axis=1, kind="stable")[:, :width]
        self.grid_P_G = np.take_along_axis(self.grid_P_G[rows], columns, axis=1)
        cache.keep(
            torch.from_numpy(rows).to(self.device), torch.from_numpy(columns).to(self.device)
        )


class _RowDecoding(_Decoding):
    """A batch with one sample per row, G = 1, for layers with a recurrent state."""

    def _prefill(self) -> tuple[Tensor, _RowCache]:
        """Next-token logits [P, V] and cache of all prompts, some rows at a time."""
        longest = max(len(row.prompt_ids) for row in self.batch)
        padded = torch.zeros((len(self.batch), longest), dtype=torch.int64)
        seen = torch.zeros_like(padded)
        for place, row in enumerate(self.batch):
            padded[place, longest - len(row.prompt_ids) :] = torch.tensor(row.prompt_ids)
            seen[place, longest - len(row.prompt_ids) :] = 1
        seen = seen.to(self.device)
        logits, caches = [], []
        rows_at_once = max(1, PREFILL_TOKENS // longest)
        for ids, mask in zip(padded.split(rows_at_once), seen.split(rows_at_once), strict=True):
            out = self.model(
                input_ids=ids.to(self.device),
                attention_mask=mask,
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
                use_cache=True,
                logits_to_keep=1,
            )
            logits.append(out.logits[:, 0])
            caches.append(out.past_key_values)
        return torch.cat(logits), _RowCache(caches, seen)
