"""Whatever fails, in whatever order: no stage is lost, none runs twice at a time, all finish.

Eight campaigns in virtual time (ten thousand in `make prove`), each under faults drawn
from its seed; and deliberate bugs, which must be noticed (all of them in `make prove`).
"""

import pytest

from tests.prove.simulation import try_seed
from tests.simulation.mutations import first_noticed

pytestmark = pytest.mark.slow

SEEDS = 8


def test_campaigns_survive_their_faults() -> None:
    results = [try_seed(seed) for seed in range(1, SEEDS + 1)]
    broken = [r for r in results if isinstance(r, str)]
    assert not broken, f"{len(broken)} of {SEEDS} schedules:\n" + "\n".join(sorted(broken)[:5])
    summaries = [r for r in results if not isinstance(r, str)]
    # The faults were there: most schedules needed more attempts than stages, and several calls.
    assert sum(s.setbacks for s in summaries) > 5 * SEEDS
    assert sum(s.attempts for s in summaries) > 5 * SEEDS
    assert sum(s.killed for s in summaries) > SEEDS / 10


@pytest.mark.parametrize(
    "name",
    ["a stale attempt is not fenced", "the last checkpoint goes before its successor is there"],
)
def test_a_deliberate_bug_is_noticed(name: str) -> None:
    assert first_noticed(name, range(1, 200)) is not None
