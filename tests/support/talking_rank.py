"""A rank that speaks to the others until it is told to stop: ``talking_rank.py FOLDER [ROLE]``.

Each round is a broadcast, a gathering and now and then a line of its own; ``ready-RANK`` is there
once they have begun, and ``stop`` ends them. ROLE ``impostor`` has the place of rank 0 and no key,
and broadcasts a pickle that makes a file; ``listener`` is the rank 1 that hears it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from refiner_core.training.ranks import TorchRanks


class Planted:
    """What runs ``touch`` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.system, (f"touch {self.path}",)


def main(folder: Path) -> None:
    """Talk to the end."""
    with TorchRanks(cuda=False) as ranks:
        others, number = ranks, 0
        while True:
            (folder / f"ready-{ranks.rank}").touch()
            number += 1
            if number % 10 == 0:
                others = ranks.line()
            heard = others.gather({"rank": others.rank, "number": number})
            assert heard is None or [said["number"] for said in heard] == [number] * ranks.world
            if ranks.broadcast((folder / "stop").exists() if ranks.rank == 0 else None):
                return
            time.sleep(0.02)


def impostor(folder: Path) -> None:
    """Be rank 0 of the same groups, and say what a rank would execute."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=2)
    group = dist.new_group(backend="gloo")
    try:
        dist.broadcast_object_list([Planted(folder / "planted")], src=0, group=group)
    finally:
        os._exit(0)


def listener(folder: Path) -> None:
    """Be rank 1, and take one word of rank 0."""
    with TorchRanks(cuda=False) as ranks:
        (folder / "heard").write_text(str(ranks.broadcast(None)))


if __name__ == "__main__":
    role = {"": main, "impostor": impostor, "listener": listener}
    role["".join(sys.argv[2:3])](Path(sys.argv[1]))
