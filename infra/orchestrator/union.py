"""The union of plans: each stage once, by id.

In: the plans of the runs that one process works on. Out: a :class:`Union`, whose stages name their
inputs by id. Stages are content-addressed, so what two trials share is one stage here: decided on
once, launched once, and shown under each run's own name for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from refiner_core.contract.plan import Plan, PlannedStage


def stages_by_id(plan: Plan) -> tuple[dict[str, PlannedStage], dict[str, PlannedStage]]:
    """Stages of a plan and those that it is given, by id; ``inputs`` and ``after`` hold ids."""

    def keyed(stage: PlannedStage) -> PlannedStage:
        inputs = {role: plan.by_name[name].id for role, name in stage.inputs.items()}
        return replace(stage, inputs=inputs, after=tuple(plan.by_name[n].id for n in stage.after))

    return {s.id: keyed(s) for s in plan.stages}, {s.id: keyed(s) for s in plan.given}


@dataclass(frozen=True)
class Union:
    """Stages by id, in an order in which those of an earlier plan come first.

    ``given`` are stages that no plan begins: they are read only. Of a stage that several plans name
    differently, ``name`` is the first one's.
    """

    stages: Mapping[str, PlannedStage]
    given: Mapping[str, PlannedStage]

    @classmethod
    def of(
        cls, plans: Iterable[tuple[Mapping[str, PlannedStage], Mapping[str, PlannedStage]]]
    ) -> Union:
        """The union of what :func:`stages_by_id` says of each plan."""
        stages: dict[str, PlannedStage] = {}
        given: dict[str, PlannedStage] = {}
        for mine, theirs in plans:
            for stage_id, stage in mine.items():
                stages.setdefault(stage_id, stage)
            given |= theirs
        return cls(stages, {i: s for i, s in given.items() if i not in stages})

    def __getitem__(self, stage_id: str) -> PlannedStage:
        """A stage, planned or given."""
        return self.stages[stage_id] if stage_id in self.stages else self.given[stage_id]
