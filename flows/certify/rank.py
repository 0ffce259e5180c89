"""Program of each rank of a certification: ``python -m flows.certify.rank``.

In: the order of the part, and the agent's settings. Out: over the bridge of rank 0, per engine the
losses and gradient norms of a short SFT, and the result and bandwidth of a sum over all ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from flows.certify.work import WorkOrder, metrics_of, open_io, recipe
from flows.ranks.rank import run_rank
from infra.ranks.bridge import RemoteIO
from infra.ranks.messages import ORDER
from refiner_core.contract.errors import UnsupportedError
from refiner_core.training.ranks import Ranks, open_ranks

#: float32 elements that a collective moves per rank.
_ELEMENTS = {True: 1 << 26, False: 1 << 21}
_ROUNDS = 5


def measure_as(rank: int) -> None:
    """Train and measure as one rank."""
    order = json.loads(os.environ[ORDER])
    io = RemoteIO.from_environment() if rank == 0 else None
    asked = WorkOrder.read(Path(order["order"]))
    with open_ranks(cuda=asked.gpus > 0) as ranks:
        report = _measured(asked, Path(order["folder"]), ranks)
    if io is not None:
        io.finish(report)


#: Four steps of four packs.
SHORT_SFT: dict[str, Any] = {
    "learning_rate": 1e-4,
    "pack_length": 160,
    "gradient_accumulation_steps": 4,
    "max_train_steps": 4,
    "num_train_epochs": 100.0,
    "async_save": False,
}


def train(order: WorkOrder, folder: Path, ranks: Ranks, zero: int, attempt: str) -> dict[str, Any]:
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


def _measured(order: WorkOrder, folder: Path, ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = {"engines": {}, "missing": {}}
    for zero in order.zero:
        try:
            found["engines"][str(zero)] = train(order, folder, ranks, zero, f"zero-{zero}")
        except UnsupportedError as error:  # no DeepSpeed: the same on every rank
            found["missing"][str(zero)] = error.what
    if ranks.world > 1:
        found["all_reduce"] = _all_reduce(order, ranks)
    return found


def _all_reduce(order: WorkOrder, ranks: Ranks) -> tuple[float, int]:
    """Bus bandwidth in GB/s, counted as in NCCL's tests, and the number of ranks with a wrong
    sum."""
    import torch
    import torch.distributed as dist

    world, size = ranks.world, _ELEMENTS[order.gpus > 0]
    device = torch.device("cuda", torch.cuda.current_device()) if order.gpus else "cpu"
    mine = torch.full((size,), float(ranks.rank + 1), device=device)
    right, seconds = [], []
    for _ in range(_ROUNDS + 1):
        value, began = mine.clone(), time.perf_counter()
        dist.all_reduce(value)
        right.append(bool((value == world * (world + 1) / 2).all()))
        seconds.append(time.perf_counter() - began)
    wrong = ranks.add([float(not all(right))])[0]
    moved = 4 * 2 * (world - 1) / world * size
    return moved / statistics.median(seconds[1:]) / 1e9, int(
        wrong
    )  # the first one connects the ranks


if __name__ == "__main__":
    run_rank(measure_as)
