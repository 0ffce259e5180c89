"""A rank of a certification whose machine is wrong: rank 1 gets other sums than the others do."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from flows.certify import rank
from flows.ranks.rank import run_rank


def main() -> None:
    """Run the rank on top of a wrong all_reduce."""
    right = dist.all_reduce

    def wrong(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        done = right(tensor, *args, **kwargs)
        if os.environ["RANK"] == "1":
            tensor.mul_(1.001)
        return done

    dist.all_reduce = wrong
    run_rank(rank.measure_as)


if __name__ == "__main__":
    main()
