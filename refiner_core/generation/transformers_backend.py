"""Samples completions from a live transformers model: the generator that needs nothing else.

In: requests (prompt ids and a seed each) and sampling parameters. Out: completions in the order of
the requests, with the log-probabilities of the distribution that was sampled from.

How a call runs:

1. Requests with one prompt form rows; rows with like shapes form batches
   (:mod:`refiner_core.generation.batches`).
2. Each row's prompt goes through the model once, padded on the right: a causal model never looks
   right, so no mask is needed, and the padding is masked while decoding.
3. All samples of a row decode side by side over one shared cache
   (:mod:`refiner_core.generation.shared_cache`).
4. A sample that finishes is handed out at once, and leaves the batch once that makes it a quarter
   smaller.

The same requests in the same order give the same bits with the same weights, threads and device.
Batched otherwise, a sample sees the same random numbers and log-probabilities that differ in the
last float digits, since sums are taken in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    OnCompletion,
    SamplingParams,
    TurnDesk,
)
from refiner_core.generation.batches import (
    PREFILL_TOKENS,
    Row,
    max_cache_entries,
    place_samples,
    plan_batches,
)
from refiner_core.generation.limits import (
    check_layers,
    check_params,
    check_window,
    stop_ids,
    stop_string_window,
    with_stop_string,
)
from refiner_core.generation.sampling import draw, refuse_not_finite, uniform_streams
from refiner_core.generation.shared_cache import SharedPromptCache
from refiner_core.generation.turns import TurnDecoding

#: Tokens per sample that a cache starts with; it doubles when they are used up.
FIRST_CAPACITY = 64
#: Finished samples are dropped when the batch then has at most this share of its places.
SHRINK_TO = 0.75


class TransformersGenerator:
    """A :class:`~refiner_core.contract.types.Generator` over a Hugging Face causal language model.

    Uses whatever weights the model has at the time of a call, in evaluation mode and without
    gradients, and leaves the model in the mode in which it found it. Attention runs through SDPA
    where the model would use a kernel that takes no mask (FlashAttention).

    Parameters
    ----------
    model
        Any causal model of transformers whose layers attend to all earlier tokens.
    tokenizer
        The model's tokenizer: its end-of-text token, and text for stop strings.
    batch_size
        Largest number of samples decoded together.
    on_step
        Called after every decoded token with (samples finished, samples asked for): a sign of life
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
        if batch_size < 1:
            raise ConfigurationError(
                f"A generation batch of {batch_size} samples cannot be decoded",
                expected="a batch size of 1 or more",
                fix="set grpo.generation_batch_size or evaluate.batch_size",
            )
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

        ``on_completion(index, completion)`` is told of each as soon as it is finished, also while
        others of its batch go on; what is sampled does not depend on it.

        Raises
        ------
        ConfigurationError
            If parameters make no sense, a prompt is empty, or prompt and new tokens together exceed
            the model's window.
        UnsupportedError
            If the model has layers that this backend cannot decode.
        StageFailed
            If the model's logits are not finite.
        """
        if not requests:
            return []
        check_params(params)
        self._check_lengths(requests, params)
        completions: dict[int, Completion] = {}
        with _ready(self.model):
            for batch in plan_batches(
                requests,
                self.batch_size,
                max_new_tokens=params.max_new_tokens,
                max_entries=max_cache_entries(self.model),
            ):
                seeds = [requests[index].seed for row in batch for index in row.requests]
                decoding = _Decoding(self, batch, seeds, params)
                for finished in decoding.steps():
                    completions.update(finished)
                    if on_completion is not None:
                        for index, completion in finished.items():
                            on_completion(index, completion)
                    if self.on_step is not None:
                        self.on_step(len(completions), len(requests))
        return [completions[index] for index in range(len(requests))]

    def turns(self, desk: TurnDesk) -> None:
        """Sample the turns of conversations, each as soon as it may begin: continuous batching.

        At most ``batch_size`` conversations are under way. How it runs:
        :mod:`refiner_core.generation.turns`. Errors as of :meth:`generate`, and those of the desk.
        """
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


@contextmanager
def _ready(model: Any) -> Iterator[None]:
    """Evaluation mode, no gradients, an attention kernel that takes masks; restored afterwards."""
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    if attention not in ("sdpa", "eager"):
        model.config._attn_implementation = "sdpa"
    try:
        # Not inference_mode: rotary embeddings may keep a tensor that training then needs.
        with torch.no_grad():
            yield
    finally:
        model.config._attn_implementation = attention
        model.train(training)


class _Decoding:
    """One batch at work. Shape suffixes: N samples of the batch, T tokens, P rows, G per row, V.

    ``grid_P_G`` names the sample at each place of the running batch (its number within the batch),
    or -1 where there is none or it has finished.
    """

    def __init__(
        self,
        generator: TransformersGenerator,
        batch: Sequence[Row],
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
        """Decode to the end; after each token, what finished with it, by index of the request."""
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

    def _prefill(self) -> tuple[Tensor, SharedPromptCache]:
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
        capacity = min(FIRST_CAPACITY, self.params.max_new_tokens)
        samples = self.grid_P_G.shape[1]
        return torch.cat(logits), SharedPromptCache(pieces, lengths, samples, capacity)

    def _forward(self, cache: SharedPromptCache, step: int) -> Tensor:
        """Feed every sample's newest token; logits [P, G, V] of the next."""
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
        """Draw a token for every live sample, store it, and retire samples that end with it.

        Returns the samples that are finished, by number within the batch.
        """
        rows, columns = np.nonzero(self.grid_P_G >= 0)
        live = self.grid_P_G[rows, columns]
        logits = logits_P_G_V[torch.from_numpy(rows), torch.from_numpy(columns)]
        uniforms = self.uniforms[live, min(step, self.uniforms.shape[1] - 1)]
        drawn = draw(logits, torch.from_numpy(uniforms).to(self.device), self.params)
        tokens = drawn.tokens_N.cpu().numpy()
        logprobs = drawn.logprobs_N.cpu().numpy()
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
        """Which live samples have just completed a stop string. Shape [len(live)], bool."""
        strings = self.params.stop_strings
        if not strings:
            return np.zeros(len(live), dtype=bool)
        first = max(0, step + 1 - stop_string_window(strings))
        tails = self.tokens_N_T[live, first : step + 1].tolist()
        return np.array(with_stop_string(self.tokenizer, tails, strings))

    def _shrink(self, cache: SharedPromptCache) -> None:
        """Drop finished samples where that makes the batch clearly smaller."""
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
