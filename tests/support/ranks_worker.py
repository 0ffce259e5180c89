"""A worker whose stage runs in two fake ranks: ``ranks_worker.py --workspace DIR STAGE ATTEMPT``.

The attempt, the agent and the way between them are the real ones.
"""

from __future__ import annotations

import argparse
import os
import sys

from infra.attempt.attempt import AttemptRun
from infra.attempt.stage_io import set_up_logging
from infra.ranks.launch import run_ranks
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.placement import Placement


def main() -> int:
    """Run one attempt; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workspace", required=True)
    parser.add_argument("stage_id")
    parser.add_argument("attempt", type=int)
    args = parser.parse_args()
    set_up_logging(RecipeConfig())
    workspace = Workspace.open(args.workspace)
    with AttemptRun(workspace, args.stage_id, args.attempt) as attempt:
        try:
            report = run_ranks(
                Placement(nodes=1, nproc_per_node=2),
                os.environ.get("RANKS_MODULE", "tests.support.fake_rank"),
                {"workspace": str(workspace.root)},
                attempt.io,
                attempt.stage_paths.data,
                check_fence=attempt.check_fence,
                shutdown_s=3,
                watch=attempt.io.ranks,
            )
            (attempt.output_dir / "made.txt").write_text("whole")
            attempt.finish(report)
        except BaseException as error:
            return attempt.fail(error).exit_code
    assert "torch" not in sys.modules, "the worker imports no torch when others train"
    return 0


if __name__ == "__main__":
    sys.exit(main())
