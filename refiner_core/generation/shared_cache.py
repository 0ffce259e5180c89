"""A key/value cache in which all samples of a prompt share that prompt's entries.

In: the entries of each prompt, computed once. Out: a cache that a stock transformers model decodes
with, and the attention mask that goes with it.

The samples of one prompt stand in one row of the batch, *as queries beside each other*: the model
sees tokens of shape [P prompts, G samples] instead of [P * G, 1]. Each row's keys are the prompt's,
then the sampled tokens', and the mask lets sample g see the prompt and its own tokens only. A
decoding step of a small model is bound by reading its cache; here eight samples of a 200-token
prompt read it once instead of eight times. It needs no attention kernel of our own, only a mask.
(Separating shared and own keys is known as "Hydragen": Juravsky et al. 2024, arXiv:2402.05099; here
one masked attention does both.)

Shape suffixes: P rows (prompts), G samples per row, H key/value heads, D head size, C capacity.
Entry ``prompt_length + t * G + g`` of a row belongs to token t of sample g.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SharedPromptLayer(CacheLayerMixin):  # type: ignore[misc]
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
        """Nothing to do: the entries of the prompts are there from the start."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset) of a step with ``query_length`` samples per row."""
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        """Filled entries of a row, all samples together (not a position in the text)."""
        return self.used

    def get_max_length(self) -> int:
        """Capacity in entries."""
        return int(self.keys.shape[2])


class SharedPromptCache:
    """The layers, the mask, and how to shrink both to the samples that are still alive.

    Parameters
    ----------
    prompts
        Per model layer, pieces of keys and values of the prompts, [rows, H, >= longest prompt, D],
        padded on the right with finite numbers. Emptied on the way, so that the prompts never
        stand in memory twice.
    prompt_lengths_P
        Tokens of each row's prompt.
    samples
        G.
    capacity
        Tokens per sample to make room for; more room is made when needed.
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
            keys = self._with_room(*(k for k, _ in pieces))
            values = self._with_room(*(v for _, v in pieces))
            layers.append(SharedPromptLayer(keys, values, self.prompt_length))
            pieces.clear()
        self.cache = Cache(layers=layers)
        self._mask = self._full_mask()

    def _with_room(self, *pieces: Tensor) -> Tensor:
        """Copy pieces [rows, H, >= used, D] into storage for ``capacity`` tokens per sample."""
        _, heads, _, size = pieces[0].shape
        used = self.prompt_length + self.tokens * self.samples
        room = self.prompt_length + self.capacity * self.samples
        storage = pieces[0].new_empty(sum(len(piece) for piece in pieces), heads, room, size)
        first = 0
        for piece in pieces:
            storage[first : first + len(piece), :, :used] = piece[:, :, :used]
            first += len(piece)
        return storage

    def _full_mask(self) -> Tensor:
        """Additive mask of the full capacity, [P, 1, G, C]: 0 is seen, the minimum is not."""
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
        if self.tokens == self.capacity:
            self.capacity *= 2
            for layer in self.cache.layers:
                layer.keys, layer.values = (
                    self._with_room(layer.keys),
                    self._with_room(layer.values),
                )
            self._mask = self._full_mask()
        self.tokens += 1
        return self.cache, self._mask[..., : self.prompt_length + self.tokens * self.samples]

    def keep(self, rows_P: Tensor, columns_P_G: Tensor) -> None:
        """Go on with some samples only.

        Parameters
        ----------
        rows_P
            Old row of each new row.
        columns_P_G
            Old column, in that old row, of each new sample. A place without a sample may name any.
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
