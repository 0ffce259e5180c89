"""Partial credit and curriculum as a recipe writes them: ``NAME=VALUE`` settings, read and checked.

In: the sections ``environment.shaping`` and ``grpo.curriculum``. Out: numbers, or a refusal that
names the field. Torch-free, and without an environment: plans are checked by it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from refiner_core.contract.environment_config import CurriculumConfig, ShapingConfig
from refiner_core.contract.errors import ConfigurationError

_SHAPING, _CURRICULUM = "environment.shaping", "grpo.curriculum"


def check_shaping(shaping: ShapingConfig) -> None:
    """Refuse partial credit that cannot be meant.

    Raises
    ------
    ConfigurationError
        A setting is not ``NAME=VALUE``, stands twice, is negative or not finite, or all weights of
        a domain are 0.
    """
    _require_number(f"{_SHAPING}.alpha", shaping.alpha)
    _settings(f"{_SHAPING}.alpha_by_domain", shaping.alpha_by_domain, "NAME=FACTOR")
    _settings(f"{_SHAPING}.weights", shaping.weights, "KIND=WEIGHT")
    own = _own_weights(shaping)
    for domain in ("", *own):
        if sum(check_weights(shaping, domain).values()) > 0:
            continue
        where = f" of {domain}" if domain else ""
        raise ConfigurationError(
            f"All weights{where} are 0 ({_SHAPING}.weights{'_by_domain' if domain else ''}): no "
            "check would count for partial credit.",
            expected="at least one weight above 0",
            fix=f"set one, or switch partial credit off with {_SHAPING}.alpha=0",
        )


def check_curriculum(curriculum: CurriculumConfig) -> None:
    """Refuse a curriculum that cannot be meant.

    Raises
    ------
    ConfigurationError
        Names the field.
    """
    if curriculum.min_attempts < 1:
        raise ConfigurationError(
            f"`{_CURRICULUM}.min_attempts` is {curriculum.min_attempts}: a task without attempts "
            "has no success rate.",
            expected="at least 1",
            fix=f"set {_CURRICULUM}.min_attempts=5",
        )
    if not 0 <= curriculum.low <= curriculum.high <= 1:
        raise ConfigurationError(
            f"`{_CURRICULUM}.low` is {curriculum.low}, and `{_CURRICULUM}.high` {curriculum.high}.",
            expected="shares with 0 <= low <= high <= 1",
            fix=f"set {_CURRICULUM}.low=0.25 and {_CURRICULUM}.high=0.75",
        )
    _require_number(f"{_CURRICULUM}.low_weight", curriculum.low_weight)
    _require_number(f"{_CURRICULUM}.high_weight", curriculum.high_weight)


def alpha_of(shaping: ShapingConfig, domain: str) -> float:
    """How much a domain's partial score counts: ``alpha`` times the domain's factor, 1 where it has
    none."""
    factors = _settings(f"{_SHAPING}.alpha_by_domain", shaping.alpha_by_domain, "NAME=FACTOR")
    return shaping.alpha * factors.get(domain, 1.0)


def check_weights(shaping: ShapingConfig, domain: str) -> Mapping[str, float]:
    """Weights of the kinds of checks in a domain. A kind that ``weights_by_domain`` does not name
    for it has the weight that it has everywhere."""
    weights = _settings(f"{_SHAPING}.weights", shaping.weights, "KIND=WEIGHT")
    return weights | _own_weights(shaping).get(domain, {})


def check_domains(shaping: ShapingConfig, known: Collection[str]) -> None:
    """Refuse settings of domains that an environment does not have.

    Raises
    ------
    ConfigurationError
        Names the field and the domains that there are.
    """
    factors = _settings(f"{_SHAPING}.alpha_by_domain", shaping.alpha_by_domain, "NAME=FACTOR")
    named = (("alpha_by_domain", factors), ("weights_by_domain", _own_weights(shaping)))
    for field, domains in named:
        for domain in domains:
            if domain not in known:
                raise ConfigurationError(
                    f"`{_SHAPING}.{field}` names {domain!r}, which is no domain of the "
                    "environment.",
                    expected=f"one of: {', '.join(known)}",
                    fix=f"correct {_SHAPING}.{field}",
                )


def check_kinds(shaping: ShapingConfig, known: Collection[str], domains: Collection[str]) -> None:
    """Refuse weights of kinds of checks that an environment does not have: they would count for
    nothing, and nobody would see it.

    Raises
    ------
    ConfigurationError
        Names the field, the kinds, and the domains, which stand elsewhere.
    """
    weights = _settings(f"{_SHAPING}.weights", shaping.weights, "KIND=WEIGHT")
    defaults = _settings(f"{_SHAPING}.weights", ShapingConfig().weights, "KIND=WEIGHT")
    named = [("weights", kind) for kind in weights if kind not in defaults]
    named += [("weights_by_domain", k) for own in _own_weights(shaping).values() for k in own]
    for field, kind in named:
        if kind not in known:
            raise ConfigurationError(
                f"`{_SHAPING}.{field}` names {kind!r}, which is no kind of check of the "
                "environment.",
                expected=f"kinds among {', '.join(known)}; its domains are {', '.join(domains)}",
                fix=f"correct {_SHAPING}.{field}; a weight for one domain stands in "
                f"{_SHAPING}.weights_by_domain, as DOMAIN.KIND=WEIGHT",
            )


def _own_weights(shaping: ShapingConfig) -> dict[str, dict[str, float]]:
    """Domain -> kind -> weight."""
    field, form = f"{_SHAPING}.weights_by_domain", "DOMAIN.KIND=WEIGHT"
    own: dict[str, dict[str, float]] = {}
    for name, value in _settings(field, shaping.weights_by_domain, form).items():
        domain, dot, kind = name.rpartition(".")
        if not dot or not domain or not kind:
            raise _unreadable(field, f"{name}={value:g}", form)
        own.setdefault(domain, {})[kind] = value
    return own


def _settings(field: str, texts: Sequence[str], form: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for text in texts:
        name, equals, number = (part.strip() for part in text.partition("="))
        try:
            value = float(number)
        except ValueError:
            raise _unreadable(field, text, form) from None
        if not name or not equals:
            raise _unreadable(field, text, form)
        if name in values:
            raise ConfigurationError(
                f"`{field}` has {name} twice ({values[name]:g} and {value:g}).",
                expected="each name once",
                fix=f"remove one of them from {field}",
            )
        _require_number(f"{field}: {name}", value)
        values[name] = value
    return values


def _unreadable(field: str, text: str, form: str) -> ConfigurationError:
    return ConfigurationError(
        f"`{field}` has {text!r}.",
        expected=f"{form}, a number after the sign",
        fix=f"correct {field}",
    )


def _require_number(field: str, value: float) -> None:
    if math.isfinite(value) and value >= 0:
        return
    raise ConfigurationError(
        f"`{field}` is {value:g}.", expected="a finite number, 0 or more", fix=f"correct {field}"
    )
