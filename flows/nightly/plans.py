"""The plan that evaluates one checkpoint: the recipe's measuring, with other weights for its base.

In: a nightly evaluation, weights, an occasion. Out: a plan of `data` and `evaluate` alone. Weights
that are the same have the same stages in every night, so that nothing is evaluated twice; the
canary has an occasion of its own in each night, and is sampled and judged afresh.
"""

from __future__ import annotations

import json

from flows.calls import check_supported, make_recipe_plan
from flows.nightly.checkpoints import Resolved
from infra.workspace import Workspace
from refiner_core.contract.plan import Plan, PlannedStage
from refiner_core.nightly.values import Nightly


def occasion_of(nightly: Nightly, night: str) -> str:
    """Under which name the canary is evaluated afresh."""
    return f"{nightly.name}/{night}"


def night_overrides(nightly: Nightly, found: Resolved, night: str) -> list[str]:
    """What the recipe is given beside the file's own overrides."""
    more = [
        "stages=[data,evaluate]",
        "only=[]",
        "evaluate.models=[base]",
        "data.sft_path=null",  # nothing is trained; what is held out does not depend on it
        f"model.name_or_path={json.dumps(found.ref)}",
    ]
    if found.revision:
        more.append(f'model.revision="{found.revision}"')
    if found.checkpoint == nightly.canary:
        more.append(f"evaluate.occasion={json.dumps(occasion_of(nightly, night))}")
    return [*nightly.overrides, *more]


def night_plan(nightly: Nightly, found: Resolved, night: str) -> Plan:
    """The plan of one checkpoint in one night.

    Raises
    ------
    ConfigurationError, DataError
        The recipe cannot be carried out as it stands.
    """
    plan = make_recipe_plan(nightly.recipe, night_overrides(nightly, found, night))
    check_supported(plan.config)
    return plan


def evaluations_in(plan: Plan) -> list[PlannedStage]:
    """The stages whose numbers are wanted, one for each protocol."""
    return [s for s in plan.stages if s.kind == "evaluate"]


def is_done(plan: Plan, workspace: Workspace) -> bool:
    """Whether all numbers are there."""
    return all(workspace.read_result(s.id) is not None for s in evaluations_in(plan))
