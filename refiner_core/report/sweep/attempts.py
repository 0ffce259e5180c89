"""What became of agents' attempts: how many passed, how the others failed.

In: groups of evaluations. Out: one :class:`~refiner_core.report.sweep.document.AttemptsRow` per
arm and domain, in the order of groups. Counts are sums over seeds; errors of the infrastructure
stand apart from failures of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from refiner_core.report.sweep.document import AttemptsRow
from refiner_core.report.sweep.groups import Group


def make_attempts(groups: Sequence[Group]) -> tuple[AttemptsRow, ...]:
    """Rows of all groups that are about agents."""
    return tuple(row for group in groups if not group.reward for row in _of_group(group))


def _of_group(group: Group) -> Iterator[AttemptsRow]:
    for arm in group.arms:
        by_domain: dict[str, list[Mapping[str, Any]]] = {}
        for seed in group.seeds_of(arm):
            told = group.cells[arm, seed].measured.episodes.get("domains") or {}
            for domain, counts in told.items():
                by_domain.setdefault(domain, []).append(counts)
        for domain, found in by_domain.items():
            yield AttemptsRow(
                arm=arm,
                model=group.model,
                decoding=group.decoding,
                protocol=group.name,
                domain=domain,
                tasks=max(int(counts["tasks"]) for counts in found),
                asked=sum(int(counts["asked"]) for counts in found),
                passed=sum(int(counts["passed"]) for counts in found),
                failures=_sum(counts["failures"] for counts in found),
                errors=_sum(counts["errors"] for counts in found),
            )


def _sum(counts: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for found in counts:
        total.update(found)
    return dict(total)
