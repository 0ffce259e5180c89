"""Names in a recipe that another package knows: of metrics, of checks, of domains.

In: a configuration. Out: nothing, or a refusal when it is planned; without this a misspelt one is
noticed after the training that it is about, or never. Torch-free; opens no environment.
"""

from __future__ import annotations

from collections.abc import Collection

from refiner_core.contract.checks.shaping import check_domains, check_kinds
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.environments.registry import DESK, TAU2
from refiner_core.evaluation.names import base_of, domain_of

_KINDS_OF_TAU2 = ("action", "communicate", "environment", "db", "nl")


def check_names(config: RecipeConfig) -> None:
    """Refuse names that nothing here has.

    Raises
    ------
    ConfigurationError
        Names the field and those that there are.
    """
    if config.environment.name:
        _check_shaping(config)
    if config.publish.which == "best" and "publish" in config.stages:
        _check_best(config)


def _check_shaping(config: RecipeConfig) -> None:
    """Partial credit of an environment that is known by name; one of a user's own says its names
    when its tasks are prepared."""
    known = _known(config.environment.name)
    if known is None:
        return
    domains, kinds = known
    check_domains(config.environment.shaping, domains)
    check_kinds(config.environment.shaping, kinds, domains)


def _known(name: str) -> tuple[Collection[str], Collection[str]] | None:
    """Domains, and kinds of checks."""
    if name == DESK:
        from refiner_core.environments.desk.episode import KINDS
        from refiner_core.environments.desk.registry import DOMAINS

        return tuple(DOMAINS), KINDS
    if name == TAU2:
        from refiner_core.environments.tau2.package import DOMAINS as OF_TAU2

        return OF_TAU2, _KINDS_OF_TAU2
    return None


def _check_best(config: RecipeConfig) -> None:
    from refiner_core.evaluation.metrics import has_metric, metrics_of

    metric, decoding = config.publish.best_metric, config.publish.best_decoding
    known = metrics_of(config)
    if not has_metric(config, metric) or _of_no_domain(config, metric):
        raise ConfigurationError(
            f"`publish.best_metric` is {metric!r}, which no evaluation of this recipe gives."
            f"{suggest(base_of(metric), known)}",
            expected="one of: " + ", ".join(known),
            fix="correct publish.best_metric",
        )
    if decoding not in config.evaluate.decoding:
        raise ConfigurationError(
            f"`publish.best_decoding` is {decoding}, and the recipe evaluates with "
            f"{', '.join(config.evaluate.decoding)} decoding alone.",
            expected="a decoding of evaluate.decoding",
            fix=f"set publish.best_decoding={config.evaluate.decoding[0]}, or add {decoding} to "
            "evaluate.decoding",
        )


def _of_no_domain(config: RecipeConfig, metric: str) -> bool:
    """Whether it is told of a domain that the environment is known not to have."""
    domain = domain_of(metric)
    known = _known(config.environment.name)
    if not domain or known is None:
        return bool(domain) and not config.environment.name
    return domain not in (config.environment.domains or known[0])
