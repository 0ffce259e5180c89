"""Fleets of the fake vLLM server in this process, and the trainer's log-probabilities."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import KilledError
from refiner_core.contract.types import Endpoint, GenerationRequest, SamplingParams
from refiner_core.generation.saving import HandOver, hand_over_of
from refiner_core.generation.vllm.client import VllmGenerator
from refiner_core.generation.vllm.sync import WeightSync
from tests.support.tiny_training import EOS, tiny_tokenizer
from tests.support.vllm_server import Served, served

WINDOW = 128
STOP = frozenset({EOS})
PLAIN = SamplingParams(max_new_tokens=12)
EXTENSION = "refiner_vllm_extension.CompleteReload"
USUAL = ("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs")


class Fixed:
    """A fleet whose servers are simply there; one that is lost has a successor, or none."""

    def __init__(self, *servers: Served, version: str = "1", key: str = "") -> None:
        self.busy = threading.Lock()
        self.version, self.stop_ids = version, STOP
        self._endpoints = [Endpoint(server.url, key) for server in servers]
        self.revived: list[tuple[int, str]] = []
        self.successor: Callable[[], Served] | None = None

    def endpoints(self) -> Sequence[Endpoint]:
        return self._endpoints

    def revive(self, index: int, why: str) -> Endpoint:
        self.revived.append((index, why))
        if self.successor is None:
            raise KilledError("no successor")
        return Endpoint(self.successor().url)


def requests(prompts: int = 3, samples: int = 4, length: int = 20) -> list[GenerationRequest]:
    """Prompts longer than a block of the prefix cache; every sample has its own seed."""
    return [
        GenerationRequest(
            tuple(3 + (7 * p + 5 * i) % 45 for i in range(length + p)), seed=100 * p + s
        )
        for p in range(prompts)
        for s in range(samples)
    ]


def generator(fleet: Any, **settings: Any) -> VllmGenerator:
    return VllmGenerator(fleet, window=WINDOW, **settings)


class InThreads:
    """Servers of this process for a weight sync."""

    def __init__(
        self, count: int, options: tuple[str, ...] = USUAL, *, max_restarts: int = 3
    ) -> None:
        self.count, self.left = count, max_restarts
        self.options = (*options, "--worker-extension-cls", EXTENSION)
        self.servers: list[Served] = []
        self.gone: list[Served] = []
        self.stack = ExitStack()

    def start(self, weights: Path) -> list[Endpoint]:
        for _ in range(self.count):
            self.servers.append(self.stack.enter_context(served(weights, *self.options)))
        return [Endpoint(server.url) for server in self.servers]

    def replace(self, index: int, weights: Path, why: str) -> Endpoint:
        self.left -= 1
        if self.left < 0:
            raise KilledError(why)
        self.gone.append(self.servers[index])
        self.servers[index] = self.stack.enter_context(served(weights, *self.options))
        return Endpoint(self.servers[index].url)

    def weights_of(self, index: int, weights: Path) -> str:
        return str(weights)

    def close(self) -> None:
        self.stack.close()


@contextmanager
def fleet_of(servers: InThreads, folder: Path) -> Iterator[WeightSync]:
    try:
        yield WeightSync(
            servers, folder, tiny_tokenizer(), tolerance=1e-3, window=WINDOW, timeout_s=240
        )
    finally:
        servers.close()


def whole(model: Any) -> HandOver:
    """The weights of a model of this process."""
    return hand_over_of(lambda: model)
