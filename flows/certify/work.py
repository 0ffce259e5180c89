"""Material for the trainings of a certification: models, rows, recipes and folders.

In: a shape and a device. Out: a model folder with random weights, prepared rows, a recipe and the
IO of an attempt, as in a training stage. Downloads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infra.attempt.stage_io import AttemptIO
from infra.store.checkpoints import CheckpointStore
from infra.store.layout import StagePaths
from infra.store.traces import read_metrics
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.placement import ModelShape
from refiner_core.contract.proofs import CertifiedCheck, CheckVerdict
from refiner_core.contract.records import from_json
from refiner_core.contract.types import DemonstrationRow
from refiner_core.data.prepared import write_demonstrations

_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size"),
)
#: Shapes for measurements: the built-in model's, and those of Qwen3.
SHAPES: dict[str, dict[str, int]] = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        "tiny": (128, 4, 4, 4, 64, 256, 779),
        "0.6B": (1024, 28, 16, 8, 128, 3072, 151_936),
        "1.7B": (2048, 28, 16, 8, 128, 6144, 151_936),
        "4B": (2560, 36, 32, 8, 128, 9728, 151_936),
    }.items()
}
#: Measured optimiser steps, after one warm-up step.
STEPS = 3


class _Load(NamedTuple):
    """Load of a training: tokens in a pack, packs in a step, rows, and the shape of a GRPO step."""

    pack: int
    packs: int
    lengths: tuple[int, ...]
    prompts: int
    prompt: int
    samples: int
    response: int


_ON_GPU = _Load(8192, 4, (4096, 2048, 1024, 1024) * 4, 4, 1536, 8, 512)
_ON_CPU = _Load(512, 2, (256, 128, 64, 64) * 2, 2, 96, 4, 32)


@dataclass(frozen=True)
class WorkOrder:
    """Order of one part, written to a file by the parent process.

    Attributes
    ----------
    gpus
        Number of GPUs; 0 is the CPU.
    dtype
        Type of weights and computation.
    model
        A key of :data:`SHAPES`.
    checkpointing
        True if activations are recomputed, because they would not fit.
    worlds
        Numbers of ranks to train with.
    zero
        ZeRO stages; 0 is plain torch.
    vllm
        Fields of ``grpo.rollout_server`` if an environment with vLLM is given.
    rank_module
        Module run by each rank.
    """

    gpus: int
    dtype: str
    model: str
    checkpointing: bool
    worlds: tuple[int, ...]
    zero: tuple[int, ...] = (0, 1, 2, 3)
    vllm: dict[str, Any] = field(default_factory=dict)
    rank_module: str = "flows.certify.rank"

    @classmethod
    def read(cls, path: Path) -> WorkOrder:
        """Read an order from a file."""
        return from_json(cls, json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Write it to a file."""
        path.write_text(json.dumps(asdict(self)))

    @property
    def device(self) -> str:
        """Device of one process."""
        return "cuda" if self.gpus else "cpu"

    @property
    def load(self) -> _Load:
        """The load of the speed tests."""
        return _ON_GPU if self.gpus else _ON_CPU


def check(name: str, held: bool, why: str, /, **figures: Any) -> CertifiedCheck:
    """A finished check; figures are rounded to four digits."""
    verdict: CheckVerdict = "pass" if held else "fail"
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}
    return CertifiedCheck(name, verdict, why, rounded)


def absent(name: str, why: str) -> CertifiedCheck:
    """A check that could not be run."""
    return CertifiedCheck(name, "absent", why)


# ---------------------------------------------------------------- models and rows


def random_model(order: WorkOrder, folder: Path) -> Path:
    """A folder with a model of the order's shape with random weights, made on its device."""
    from refiner_core.models.random_model import save_random_model

    if folder.is_dir():
        return folder
    return save_random_model(folder, **SHAPES[order.model], dtype=order.dtype, device=order.device)


def shape_of(model: str) -> ModelShape:
    """Sizes of a shape, for memory forecasts."""
    s = SHAPES[model]
    width, pairs = (s["head_dim"] * s[k] for k in ("num_attention_heads", "num_key_value_heads"))
    layer = 2 * s["hidden_size"] * (width + pairs) + 3 * s["hidden_size"] * s["intermediate_size"]
    return ModelShape(
        parameters=s["num_hidden_layers"] * layer + s["vocab_size"] * s["hidden_size"],
        hidden=s["hidden_size"],
        inner=s["intermediate_size"],
        layers=s["num_hidden_layers"],
        pairs=pairs,
        words=s["vocab_size"],
    )


def write_rows(folder: Path, lengths: list[int], *, seed: int = 0) -> Path:
    """Demonstrations of these lengths with random tokens, all but the first quarter with loss."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    rows = [
        DemonstrationRow(
            f"row-{i}",
            tuple(int(t) for t in rng.integers(10, 700, length)),
            tuple(place >= length // 4 for place in range(length)),
        )
        for i, length in enumerate(lengths)
    ]
    write_demonstrations(folder / "sft_train.parquet", rows)
    return folder


def recipe(
    order: WorkOrder, *, ranks: int = 1, zero: int = 0, **sections: Mapping[str, Any]
) -> RecipeConfig:
    """A recipe that trains on the order's device, without saves; ``sections`` has further
    fields."""
    trained: dict[str, Any] = {
        "resources.gpus": ranks if order.gpus else 0,
        "nproc_per_node": ranks,
        "deepspeed_stage": zero or None,
        "save_freq": 10**6,
    }
    model = {"dtype": order.dtype, "gradient_checkpointing": order.checkpointing}
    changes: dict[str, Any] = {"stages": ["sft"]}
    default = {"model": model, "sft": trained, "grpo": {**trained, "beta": 0.0}}
    for section, fields in (*default.items(), *sections.items()):
        changes |= {f"{section}.{name}": value for name, value in fields.items()}
    return replace_fields(RecipeConfig(), changes)


def sft_recipe(order: WorkOrder) -> RecipeConfig:
    """The SFT for speed and memory; the measuring process ends it."""
    steps = {"max_train_steps": 10 * STEPS, "num_train_epochs": 1000.0}
    packs = {"pack_length": order.load.pack, "gradient_accumulation_steps": order.load.packs}
    return recipe(order, sft={**steps, **packs})


def open_io(folder: Path, kind: type[AttemptIO] = AttemptIO) -> AttemptIO:
    """IO of an attempt in a folder of its own, with the real checkpoint store."""
    paths = StagePaths(folder / "control", folder / "data")
    return kind(paths, 1, CheckpointStore(paths.checkpoints, 1))


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Logged steps of the attempt in this folder."""
    path = StagePaths(folder / "control", folder / "data").attempt(1).metrics
    return [dict(line.metrics) for line in read_metrics(path)]
