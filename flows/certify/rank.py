"""Program of each rank of a certification: ``python -m flows.certify.rank``.

In: the order of the part, and the agent's settings. Out: over the bridge of rank 0, per engine the
losses and gradient norms of a short SFT.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flows.certify.work import Order, metrics_of, open_io, recipe
from flows.ranks.rank import run_rank
from infra.ranks.bridge import RemoteIO
from infra.ranks.protocol import ORDER
from refiner_core.contract.errors import UnsupportedError
from refiner_core.training.ranks import Ranks, open_ranks


def measure_as(rank: int) -> None:
    """Train as one rank, with each engine in turn."""
    told = json.loads(os.environ[ORDER])
    io = RemoteIO.from_environment() if rank == 0 else None
    order, folder = Order.read(Path(told["order"])), Path(told["folder"])
    found: dict[str, Any] = {"engines": {}, "missing": {}}
    with open_ranks(cuda=order.gpus > 0) as ranks:
        for zero in order.zero:
            try:
                found["engines"][str(zero)] = train(order, folder, ranks, zero, f"zero-{zero}")
            except UnsupportedError as error:  # no DeepSpeed: the same on every rank
                found["missing"][str(zero)] = error.what
    if io is not None:
        io.finish(found)


#: Four steps of four packs.
SHORT_SFT: dict[str, Any] = {
    "learning_rate": 1e-4,
    "pack_length": 160,
    "gradient_accumulation_steps": 4,
    "max_train_steps": 4,
    "num_train_epochs": 100.0,
    "async_save": False,
}


def train(order: Order, folder: Path, ranks: Ranks, zero: int, attempt: str) -> dict[str, Any]:
    """Losses and gradient norms of a short SFT of the built-in model."""
    from refiner_core.training.sft import train_sft

    place = folder / attempt
    config = recipe(order, ranks=ranks.world, zero=zero, sft=SHORT_SFT)
    train_sft(
        config,
        data_dir=folder / "rows",
        model_ref="builtin:tiny",
        output_dir=place / "output",
        io=open_io(place) if ranks.rank == 0 else None,
        ranks=ranks,
    )
    rows = metrics_of(place) if ranks.rank == 0 else []
    return {
        "loss": [row["loss/train_avg"] for row in rows],
        "norm": [row["grad_norm"] for row in rows],
    }


if __name__ == "__main__":
    run_rank(measure_as)
