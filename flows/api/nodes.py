"""What a node can do: tried by `refiner certify`, with figures.

In: a recipe, or none. Out: a certificate, which the workspace keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.proofs import Certificate, CertifiedCheck
from refiner_core.contract.records import to_json


def certify_node(
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    only: Sequence[str] = (),
    time_limit_s: float = 900.0,
    tell: Callable[[CertifiedCheck], None] = lambda check: None,
) -> Certificate:
    """Try on this node what training relies on, and record it in the workspace.

    Parameters
    ----------
    recipe, overrides
        As for :func:`flows.api.run_recipe`; without a recipe, words on the defaults. Workspace,
        type of weights and ``grpo.rollout_server`` are used.
    model
        Shape to measure speed with: ``tiny``, ``0.6B``, ``1.7B``, ``4B``; None is the largest that
        fits.
    only
        Parts to try; with some alone, nothing is recorded.
    time_limit_s
        Seconds for all of it.
    tell
        Hears each check as it is made.

    Returns
    -------
    Certificate
        Checks with verdicts and figures; ``passed`` says whether none failed.

    Raises
    ------
    ConfigurationError
        There is no such recipe, part or shape.
    StageFailed
        torch cannot be used at all.
    """
    from flows.certify.node import certify
    from refiner_core.contract.loading import apply_overrides, load_recipe

    config = (
        load_recipe(recipe, overrides) if recipe else apply_overrides(RecipeConfig(), overrides)
    )
    return certify(config, model=model, only=only, time_limit_s=time_limit_s, tell=tell)


def certificate_json(certificate: Certificate) -> dict[str, Any]:
    """A certificate for scripts.

    Parameters
    ----------
    certificate
        What :func:`flows.api.certify_node` has made.

    Returns
    -------
    dict
        What ``refiner certify --json`` prints: ``checks`` with ``name``, ``verdict`` (``pass``,
        ``fail``, ``absent``), ``why`` and ``figures``; ``passed``; GPUs and versions.
        It raises nothing.
    """
    return {**to_json(certificate), "passed": certificate.passed}
