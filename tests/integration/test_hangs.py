"""Faults of a rank: the attempt ends in time, and names the rank and the class. `make prove` has a
hundred."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.hangs import FaultLab, FaultVerdict, PlannedFault

FAULTS = (
    PlannedFault("sleep", "update", 1),
    PlannedFault("loop", "generate", 0),
    PlannedFault("skip", "judge", 1),
    PlannedFault("die", "validate", 1),
    PlannedFault("memory", "update", 0),
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
def test_rank_and_class_are_named_in_time(
    verdicts: dict[PlannedFault, FaultVerdict], fault: PlannedFault
) -> None:
    found = verdicts[fault]
    assert found.named, found.outcome
    assert found.in_time, found
    if fault.kind in ("sleep", "loop"):
        stacks = found.stacks
        assert f"=== rank {fault.rank}" in stacks
        assert f"_{fault.kind}" in stacks, "the function that the lagging rank is in"
        assert f"_{fault.kind} (hanging_rank.py" in found.outcome.message  # type: ignore[union-attr]
