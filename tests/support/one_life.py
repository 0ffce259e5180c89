"""An attempt from its claim to its last word, in one process, on a disk that may go wrong.

python -m tests.support.one_life WORKSPACE K     killed (SIGKILL) at operation K
"""

from __future__ import annotations

import sys
from pathlib import Path

from infra.attempt.attempt import AttemptRun
from infra.store.workspace import Claim, Workspace
from refiner_core.contract.config import DiskConfig
from refiner_core.contract.plan import PlannedStage
from tests.support.fake_worker import work
from tests.support.faulty_disk import FaultyDisk
from tests.support.plans import OWNER, small_plan

#: Three checkpoints of which two are kept, so that one is deleted.
TOLD = {"steps": 3, "step_s": 0.0, "bytes": 100}
PLAN = small_plan("data", disk=DiskConfig(probe="statvfs", hold_s=0.0))
STAGE: PlannedStage = PLAN.by_name["data"]


def one_life(root: Path, after: int = 0) -> int | None:
    """Open, claim, work, finish; the exit code, None if the claim was not made.

    Raises
    ------
    RefinerError
        It ended before the worker had anything to say.
    """
    workspace = Workspace.open(root)
    claim = Claim(OWNER, "local", after)
    attempt = workspace.claim_attempt(STAGE, PLAN.config, {}, claim)
    if attempt is None:
        return None
    run = AttemptRun(workspace, STAGE.id, attempt.number, own_log=False)
    with run:
        try:
            run.finish(work(run, TOLD))
        except BaseException as error:
            return run.fail(error).exit_code
    return 0


if __name__ == "__main__":
    with FaultyDisk(Path(sys.argv[1]), int(sys.argv[2]), "SIGKILL").mounted():
        one_life(Path(sys.argv[1]))
