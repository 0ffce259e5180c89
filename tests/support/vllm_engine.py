"""The model behind the fake vLLM server: a real one, sampled token by token, with vLLM's traps.

In: a model folder and requests. Out: tokens and true log-probabilities. Like vLLM on a CPU:

- the output head is a packed copy, made when the model is loaded; ``reload_weights`` does not
  renew it (a worker extension may);
- a reload accepts a checkpoint that lacks weights, and one that fails leaves garbage;
- the first blocks of a prompt are cached by (salt, tokens) with the weights of their time, until
  the cache is reset;
- a seed draws the same numbers whatever the prompt is.
"""

from __future__ import annotations

import copy
import importlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

BLOCK = 16


class VocabParallelEmbedding(torch.nn.Module):
    """The head: ``cpu_linear`` computes with a packed copy of the weight."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.quant_method = SimpleNamespace(process_weights_after_loading=type(self).pack)
        self.pack()

    def pack(self) -> None:
        packed = self.embedding.weight.detach().clone()
        self.cpu_linear = lambda hidden: torch.nn.functional.linear(hidden, packed)


@dataclass
class Sampling:
    """One choice that is to be sampled."""

    prompt: list[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int | None
    stop_ids: frozenset[int]
    stop: list[str]
    skip_special: bool
    salt: str
    raw: bool
    prompt_logprobs: bool = False


@dataclass
class Sampled:
    """A choice as far as it is."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    stop_reason: int | str | None = None
    scores: list[float] = field(default_factory=list)


class Worker:
    """The methods that ``/collective_rpc`` reaches; a worker extension is mixed in."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model_runner = SimpleNamespace(get_model=lambda: engine.head)

    def reload_weights(self, weights_path: str) -> None:
        self.engine.reload(Path(weights_path))


class Engine:
    """The model and its caches. One token of one request at a time."""

    def __init__(self, folder: Path, extension: str | None = None) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.head = VocabParallelEmbedding(self.model.get_output_embeddings())
        self.lock = threading.Lock()
        self.prefixes: dict[tuple[str, tuple[int, ...]], DynamicCache] = {}
        kinds: tuple[type, ...] = (Worker,)
        if extension is not None:
            module, _, name = extension.rpartition(".")
            kinds = (getattr(importlib.import_module(module), name), Worker)
        self.worker = type("Extended", kinds, {})(self)

    def call(self, method: str, kwargs: dict[str, Any]) -> Any:
        """A method of the worker; what fails half-way leaves garbage behind."""
        with self.lock:
            try:
                return getattr(self.worker, method)(**kwargs)
            except Exception:
                for weight in self.model.parameters():
                    weight.data.add_(torch.randn_like(weight))
                self.head.pack()
                raise

    def reload(self, folder: Path) -> None:
        """Put what the files have into place; what they lack stays as it was."""
        index = folder / "model.safetensors.index.json"
        names = ["model.safetensors"]
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if not (folder / names[0]).exists():
            raise FileNotFoundError(f"{folder} has no weights")
        mine = dict(self.model.named_parameters())
        with torch.no_grad():
            for name in names:
                for key, value in load_file(folder / name).items():
                    mine[key].copy_(value)

    def forget(self) -> None:
        with self.lock:
            self.prefixes.clear()

    def steps(self, wanted: Sampling) -> Iterator[Sampled]:
        """Sample to the end; yields after each token, so that a request may wait or be given up."""
        random = torch.Generator()
        random.manual_seed(wanted.seed) if wanted.seed is not None else random.seed()
        done, ids = Sampled(), list(wanted.prompt)
        with self.lock:
            logits_T_V, cache = self._prefill(wanted)
        if wanted.prompt_logprobs:
            scores = logits_T_V[:-1].log_softmax(-1)
            done.scores = [scores[i, t].item() for i, t in enumerate(ids[1:])]
        while True:
            token, logprob = _draw(logits_T_V[-1], wanted, random)
            done.tokens.append(token)
            done.logprobs.append(logprob)
            self._look_for_end(done, wanted)
            yield done
            if done.finish is not None:
                return
            with self.lock:
                logits_T_V = self._forward([token], cache)

    @torch.no_grad()
    def _forward(self, ids: list[int], cache: DynamicCache) -> Tensor:
        hidden = self.model.model(
            input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True
        ).last_hidden_state[0]
        logits: Tensor = self.head.cpu_linear(hidden)
        return logits.float()

    def _prefill(self, wanted: Sampling) -> tuple[Tensor, DynamicCache]:
        ids = wanted.prompt
        blocks = (len(ids) - 1) // BLOCK * BLOCK
        if wanted.prompt_logprobs or not blocks:
            cache = DynamicCache()
            return self._forward(ids, cache), cache
        key = (wanted.salt, tuple(ids[:blocks]))
        if key not in self.prefixes:
            self.prefixes[key] = DynamicCache()
            self._forward(ids[:blocks], self.prefixes[key])
        cache = copy.deepcopy(self.prefixes[key])
        return self._forward(ids[blocks:], cache), cache

    def _look_for_end(self, done: Sampled, wanted: Sampling) -> None:
        token = done.tokens[-1]
        text = self.tokenizer.decode(done.tokens, skip_special_tokens=wanted.skip_special)
        found = next((stop for stop in wanted.stop if stop in text), None)
        if token in wanted.stop_ids:
            done.finish, done.stop_reason = "stop", token
        elif found is not None:
            done.finish, done.stop_reason = "stop", found
        elif len(done.tokens) == wanted.max_tokens:
            done.finish = "length"


def _draw(logits_V: Tensor, wanted: Sampling, random: torch.Generator) -> tuple[int, float]:
    raw_V = logits_V.log_softmax(-1)
    if wanted.temperature == 0:
        token = int(logits_V.argmax())
        return token, raw_V[token].item()
    scaled_V = logits_V / wanted.temperature
    if 0 < wanted.top_k < len(scaled_V):
        scaled_V = scaled_V.masked_fill(
            scaled_V < scaled_V.topk(wanted.top_k).values[-1], -torch.inf
        )
    if wanted.top_p < 1:
        ordered, order = scaled_V.sort(descending=True)
        mass = ordered.softmax(-1)
        ordered = ordered.masked_fill(mass.cumsum(-1) - mass >= wanted.top_p, -torch.inf)
        scaled_V = torch.empty_like(ordered).scatter_(-1, order, ordered)
    noise_V = torch.empty_like(scaled_V).exponential_(generator=random)
    token = int((scaled_V.softmax(-1) / noise_V).argmax())
    return token, (raw_V if wanted.raw else scaled_V.log_softmax(-1))[token].item()
