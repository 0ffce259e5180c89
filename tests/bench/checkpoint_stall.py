"""`python -m tests.bench checkpoint_stall`.

How long a training step waits at a save: ours copies the state to host memory and writes it while
training goes on (`async_save`), through the real boundary, store and file formats, with fsync,
hashes and marker; the rival is a synchronous `torch.save` of the same tensors and an fsync, on the
same disk. ABAB order, medians; every file is read back and compared once. Goal: at most 15 %.

Besides: `step_beside`, how long a training step takes while a save is written, over one with
nothing beside it (on a GPU the host's cores are idle; on a CPU the two share them).
"""

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from infra.attempt.stage_io import AttemptIO
from infra.store.checkpoints import CheckpointStore, damage_of, step_name
from infra.store.layout import StagePaths
from refiner_core.contract.config import ModelConfig
from refiner_core.training.batches import Sample, build_pack, collate
from refiner_core.training.engines.plain import PlainEngine
from refiner_core.training.model.loading import LoadedModel
from refiner_core.training.steps.checkpoint_manager import CheckpointManager
from tests.bench.__main__ import machine
from tests.support.tiny_training import tiny_model, tiny_tokenizer

GOAL_SHARE, ROUNDS = 0.15, 5
MIB = 2**20
#: Bytes of a float32 parameter with AdamW's two moments.
BYTES_PER_PARAMETER = 12
TOKENS, HEADS, HEAD_DIM = 128, 8, 64


def main(arguments: list[str]) -> int:
    """One line per size; 0 even where the goal is missed: the lines say so."""
    torch.set_num_threads(1)
    for size in (64, 256, 1024):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measured(size, Path(folder))), flush=True)
    return 0


def measured(size_mib: int, folder: Path) -> dict[str, Any]:
    """A state of about ``size_mib``."""
    work = Work(size_mib, folder)
    alone = statistics.median(work.train() for _ in range(5))
    work.save()  # the first one has to get its memory from the system
    stalls: list[float] = []
    rivals: list[float] = []
    beside: list[float] = []
    for _ in range(ROUNDS):
        stalls.append(work.save())
        while work.writing:
            beside.append(work.train())
        work.settle()
        rivals.append(work.rival())
    work.check()
    ours, rival = statistics.median(stalls), statistics.median(rivals)
    return {
        "name": f"checkpoint stall, {work.bytes / MIB:.0f} MiB",
        "ours": round(ours, 4),
        "rival": round(rival, 4),
        "ratio": round(rival / ours, 2),
        "unit": "s of stall",
        "share": round(ours / rival, 3),
        "goal_met": ours <= GOAL_SHARE * rival,
        "step_s": round(alone, 4),
        "step_beside": round(statistics.median(beside) / alone, 2) if beside else None,
        "rounds": ROUNDS,
        "machine": machine(),
    }


class Work:
    """A model in training, with what a stage has around it."""

    def __init__(self, size_mib: int, folder: Path) -> None:
        width = 512 if size_mib <= 256 else 1024
        layer = 4 * width * HEADS * HEAD_DIM + 3 * width * 4 * width
        layers = max(1, round(size_mib * MIB / BYTES_PER_PARAMETER / layer))
        model = tiny_model(
            **{"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers},
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), HEADS),
            head_dim=HEAD_DIM,
            initializer_range=0.02,
        )
        loaded = LoadedModel(model, tiny_tokenizer(), share_prompts=False, balance=None)
        self.engine = PlainEngine(loaded, ModelConfig(), learning_rate=1e-4, max_grad_norm=1.0)
        sample = Sample((), tuple(i % 40 for i in range(TOKENS)), (True,) * TOKENS)
        self.batch = collate([build_pack([[sample]])])
        self.folder, self.steps = folder, itertools.count(1)
        paths = StagePaths(folder / "control", folder / "data")
        store = CheckpointStore(paths.checkpoints, 1, before_commit=lambda: self.io.flush())
        self.io = AttemptIO(paths, 1, store)
        self.train()  # the optimiser has its state from the first step on
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        assert self.bytes > 2.9 * weights, "AdamW keeps two numbers per weight"
        # every step from 1 on is one to save at
        self.edge = CheckpointManager(self.io, self.engine, "sft", 10**6, 1, async_save=True)
        self.saved: tuple[int, dict[str, Any]] = (0, {})

    @property
    def bytes(self) -> int:
        """Of the state that both sides write."""
        return sum(t.numel() * t.element_size() for t in _tensors(self._state()))

    @property
    def writing(self) -> bool:
        """Whether a save is under way."""
        save = self.edge._under_way
        return save is not None and not save[1].done()

    def train(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        self.engine.backward(-self.engine.score(self.batch).logprob_T.mean())
        self.engine.step(1.0)
        return time.perf_counter() - began

    def save(self) -> float:
        """Seconds for which a step that saves is longer."""
        step = next(self.steps)
        self.settle()
        weights = {n: p.detach().clone() for n, p in self.engine.model.named_parameters()}
        began = time.perf_counter()
        self.edge.after(step, {"step": step}, {})
        stall = time.perf_counter() - began
        self.saved = (step, weights)
        return stall

    def settle(self) -> None:
        """Wait for what is under way."""
        self.edge._wait()
        self.edge.saved_step = 0

    def rival(self) -> float:
        """Seconds of a synchronous save of the same tensors."""
        state, path = self._state(), self.folder / "rival.pt"
        began = time.perf_counter()
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        assert path.stat().st_size >= self.bytes
        path.unlink()
        return seconds

    def check(self) -> None:
        """What lies on the disk is the state of the step that was saved, to the last bit."""
        self.settle()
        step, weights = self.saved
        found = self.io.checkpoints.latest()
        assert found is not None
        assert (found.path.name, damage_of(found)) == (step_name(step), None)
        written = load_file(found.path / "model.safetensors")
        assert all(torch.equal(written[name], weights[name]) for name in written)
        sizes = sum(p.stat().st_size for p in found.path.glob("*.safetensors"))
        assert sizes >= self.bytes, "both sides write the same state"

    def _state(self) -> dict[str, Any]:
        """Weights and what the optimiser keeps of them."""
        source = self.engine
        states = {name: dict(state) for name, state in source.states(lambda _: True)}
        return {"model": dict(self.engine.model.named_parameters()), "optimizer": states}


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    found = value.values() if isinstance(value, dict) else ()
    return [tensor for item in found for tensor in _tensors(item)]
