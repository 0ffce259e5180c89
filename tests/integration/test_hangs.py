"""Faults of a rank: the attempt ends, and names the rank and the class. `make prove` has a
hundred."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.store.workspace import Workspace
from tests.support.command import ROOT, environment
from tests.support.hangs import FaultLab, FaultVerdict, PlannedFault

FAULTS = (
    PlannedFault("sleep", "update", 1),
    PlannedFault("die", "validate", 1),
    PlannedFault("full", "save", 1),
)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[PlannedFault, FaultVerdict]:
    """All faults, three at a time."""
    lab = FaultLab(tmp_path_factory.mktemp("faults"), floor_s=4.0)
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda fault: lab.run(fault, f"{fault.kind}-{fault.phase}"), FAULTS)
        return dict(zip(FAULTS, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind} in {fault.phase}")
def test_rank_and_class_are_named(
    verdicts: dict[PlannedFault, FaultVerdict], fault: PlannedFault
) -> None:
    found = verdicts[fault]
    assert found.named, found.outcome
    if fault.kind == "sleep":
        stacks = found.stacks
        assert f"=== rank {fault.rank}" in stacks
        assert "_sleep" in stacks, "the function that the lagging rank is in"
        assert "_sleep (hanging_rank.py" in found.outcome.message


@pytest.mark.slow
def test_a_stage_in_one_process_names_the_function_that_it_is_in(tmp_path: Path) -> None:
    worker = ROOT / "tests" / "support" / "stalling_worker.py"
    done = subprocess.run(
        [sys.executable, str(worker), str(tmp_path)], env=environment(), timeout=240
    )
    assert done.returncode == 1
    workspace = Workspace.open(tmp_path)
    (stage_id,) = workspace.stage_ids()
    record = workspace.read_record(stage_id)
    assert record is not None
    outcome = record.attempts[-1].outcome
    assert outcome is not None
    assert (outcome.failure, outcome.decision, outcome.step) == ("hung", "resume", 6)
    assert "in phase train" in outcome.message
    assert "it is in stuck_reader (stalling_worker.py:" in outcome.message
