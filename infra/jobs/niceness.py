"""Local jobs that give way to the trainer: what they do can wait, a training step cannot.

In: a plan's stage. Out: whether its job gives way (:mod:`infra.jobs.give_way`). On a cluster jobs
have cores of their own, so nothing changes there.
"""

from __future__ import annotations

from refiner_core.contract.plan import Plan, PlannedStage

_KINDS = ("fetch", "export", "publish", "card")


def gives_way(plan: Plan, stage: PlannedStage) -> bool:
    """Whether a stage's job gives way: it only moves bytes, or it evaluates a checkpoint that was
    exported while training goes on."""
    if stage.kind in _KINDS:
        return True
    source = plan.by_name.get(stage.inputs.get("weights", ""))
    return stage.kind == "evaluate" and source is not None and source.kind == "export"
