"""The plan that evaluates one checkpoint: the recipe's measuring, with other weights for its base.

In: a nightly evaluation, weights, an occasion. Out: a plan of `data` and `evaluate` alone. Weights
that are the same have the same stages in every night, so that nothing is evaluated twice; the
canary has an occasion of its own in each night, and is sampled and judged afresh.
"""

from __future__ import annotations

import json
from typing import Any

from flows.checking.sources import resolve_sources
from flows.nightly.checkpoints import Resolved
from flows.running.calls import check_supported
from infra.store.workspace import Workspace
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import Plan, PlannedStage, make_plan
from refiner_core.nightly.values import Nightly


def occasion_of(nightly: Nightly, night: str) -> str:
    """Under which name the canary is evaluated afresh."""
    return f"{nightly.name}/{night}"


def base_config(nightly: Nightly) -> RecipeConfig:
    """The recipe with the file's own overrides: read once for all checkpoints of a night.

    Raises
    ------
    ConfigurationError
        Unknown recipe, key or value.
    """
    return load_recipe(nightly.recipe, nightly.overrides)


def _changes(nightly: Nightly, found: Resolved, night: str) -> dict[str, Any]:
    """What the recipe is given beside that."""
    changes: dict[str, Any] = {
        "stages": ["data", "evaluate"],
        "only": [],
        "evaluate.models": ["base"],
        "data.sft_path": None,  # nothing is trained; what is held out does not depend on it
        "model.name_or_path": found.ref,
    }
    if found.revision:
        changes["model.revision"] = found.revision
    if found.checkpoint == nightly.canary:
        changes["evaluate.occasion"] = occasion_of(nightly, night)
    return changes


def night_overrides(nightly: Nightly, found: Resolved, night: str) -> list[str]:
    """The same as words of a command line, for the call's record."""
    changes = _changes(nightly, found, night)
    return [*nightly.overrides, *(f"{k}={json.dumps(v)}" for k, v in changes.items())]


def night_plan(nightly: Nightly, found: Resolved, night: str, base: RecipeConfig) -> Plan:
    """The plan of one checkpoint in one night; ``base`` is :func:`base_config`.

    Raises
    ------
    ConfigurationError, DataError
        The recipe cannot be carried out as it stands.
    """
    config = check_config(replace_fields(base, _changes(nightly, found, night)))
    check_supported(config)
    return make_plan(config, resolve_sources(config))


def evaluations_in(plan: Plan) -> list[PlannedStage]:
    """The stages whose numbers are wanted, one for each protocol."""
    return [s for s in plan.stages if s.kind == "evaluate"]


def is_done(plan: Plan, workspace: Workspace) -> bool:
    """Whether all numbers are there."""
    return all(workspace.read_result(s.id) is not None for s in evaluations_in(plan))
