"""Section `environment`: an agent's environment and tools, its user, and partial credit.

A recipe with an empty ``environment.name`` has refiner's own task: one prompt, one answer. With a
name, every prompt is a *task* and every rollout an *episode*: turns of the model, answered by tools
and a user. Formulas are in ``refiner_core/environments/README.md``. Three fields of GRPO then mean
this: ``grpo.response_length`` is the largest number of sampled tokens of *one turn*,
``grpo.max_token_length`` the context limit of the whole episode, and ``grpo.stop_strings`` are not
used (a turn ends at ``</tool_call>``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Literal

from pydantic.dataclasses import dataclass

from refiner_core.contract.errors import ConfigurationError, suggest
from refiner_core.contract.marks import STRICT, added, execution, section


@dataclass(frozen=True, config=STRICT)
class UserConfig:
    """The simulated user of an agent, if it is a model (environments may have their own)."""

    model: str = added(
        "",
        doc="model of the simulated user at an OpenAI-compatible endpoint; empty is the "
        "environment's own scripted user, if it has one",
    )
    base_url: str = execution("", doc="its endpoint, e.g. `http://127.0.0.1:8000/v1`")
    api_key_env: str = execution(
        "OPENAI_API_KEY", doc="environment variable with its key; the only place for a key"
    )
    temperature: float = added(0.7, ge=0, le=10, doc="its sampling temperature")
    max_tokens: int = added(512, ge=1, doc="longest message of the user (tokens)")
    timeout_s: float = execution(60.0, gt=0, doc="deadline of one request, seconds")
    max_retries: int = execution(5, ge=0, doc="retries of a failed request")


@dataclass(frozen=True, config=STRICT)
class ShapingConfig:
    """Partial credit: ``reward + alpha x partial``, where partial is the weighted share of checks
    that passed, renormalised over the kinds of checks that a task has."""

    alpha: float = added(0.25, ge=0, doc="weight of partial credit in training")
    alpha_by_domain: tuple[str, ...] = added(
        (), doc="factors on alpha by domain, `NAME=FACTOR` each; default 1"
    )
    weights: tuple[str, ...] = added(
        ("action=0.5", "communicate=0.15", "environment=0.35"),
        doc="weights of the kinds of checks, `KIND=WEIGHT` each",
    )
    weights_by_domain: tuple[str, ...] = added(
        (), doc="weights of a domain of its own, `DOMAIN.KIND=WEIGHT` each"
    )


@dataclass(frozen=True, config=STRICT)
class EnvironmentConfig:
    """An agent's environment; see :mod:`refiner_core.environments`."""

    name: str = added(
        "",
        doc="`desk` (shipped), `tau2` (if installed), or FILE.py:NAME of your own; empty is "
        "refiner's task without tools",
    )
    domains: tuple[str, ...] = added((), doc="domains in use; default: all")
    train_split: str = added("train", doc="split of the training tasks")
    test_split: str = added("test", doc="split of the held-out tasks")
    tasks: str | None = added(None, doc="file of tasks instead of the environment's own")
    max_train_tasks: int | None = added(None, ge=1, doc="use at most this many training tasks")
    demonstrations: int = added(
        0,
        ge=0,
        doc="demonstrations by the environment's own expert for SFT, if it has one and "
        "data.sft_path names no file",
    )
    flawed_demonstrations: float = added(
        0.0, ge=0, le=1, doc="share of those demonstrations in which the expert makes a mistake"
    )
    max_turns: int = added(100, ge=1, doc="turns of the agent in an episode")
    repairs: Literal[0, 1] = added(
        1, doc="retries, at temperature 0, of a turn that is not a tool call"
    )
    unparsable: Literal["failure", "exclude"] = added(
        "failure",
        doc="an episode that ends with a turn that is not a tool call: a failure, or left out of "
        "training as in the reference (survivorship bias); in evaluation it is a failure",
    )
    max_argument_bytes: int = added(
        65536, ge=16, doc="a tool call with longer arguments is refused, bytes"
    )
    nl_assertions: Literal["exclude", "judge"] = added(
        "exclude",
        doc="assertions in plain language: left out of the reward, with a note, or decided by the "
        "recipe's judge",
    )
    schedule: Literal["auto", "ordered", "eager"] = added(
        "auto",
        doc="when a turn begins: `ordered`, at a step of decoding that only the episodes determine "
        "(bitwise repeatable); `eager`, as soon as its tools have answered; `auto`: ordered if "
        "the environment is deterministic",
    )
    turn_timeout_s: float = execution(
        300.0,
        gt=0,
        doc="limit for tools and user in one turn, beyond which it is an error of the "
        "infrastructure, seconds",
    )
    episode_timeout_s: float = execution(
        3600.0, gt=0, doc="limit for a whole episode, without the model's own turns, seconds"
    )
    workers: int = execution(16, ge=1, le=4096, doc="tools and users that run at a time")
    max_error_share: float = execution(
        0.5,
        ge=0,
        le=1,
        doc="largest share of a step's (or an evaluation's) episodes that end by errors of the "
        "infrastructure, before the stage stops, resumable",
    )
    user: UserConfig = section(UserConfig, doc="the user in training")
    shaping: ShapingConfig = section(ShapingConfig, doc="partial credit")


_SHAPING = "environment.shaping"
#: Form of each setting of partial credit.
_FORMS = {
    "alpha_by_domain": "NAME=FACTOR",
    "weights": "KIND=WEIGHT",
    "weights_by_domain": "DOMAIN.KIND=WEIGHT",
}


def check_shaping(shaping: ShapingConfig) -> None:
    """Refuse impossible partial credit.

    Raises
    ------
    ConfigurationError
        A setting is not ``NAME=VALUE``, is duplicate, negative or not finite, or all weights of a
        domain are 0.
    """
    _settings(shaping, "alpha_by_domain")
    for domain in ("", *_own_weights(shaping)):
        if not any(check_weights(shaping, domain).values()):
            raise ConfigurationError(
                f"All weights{domain and ' of '}{domain} are 0 ({_SHAPING}.weights"
                f"{'_by_domain' if domain else ''}): no check would count for partial credit.",
                expected="at least one weight above 0",
                fix=f"set one, or switch partial credit off with {_SHAPING}.alpha=0",
            )


def alpha_of(shaping: ShapingConfig, domain: str) -> float:
    """Weight of a domain's partial score: ``alpha`` times the domain's factor, 1 if it has
    none."""
    return shaping.alpha * _settings(shaping, "alpha_by_domain").get(domain, 1.0)


def check_weights(shaping: ShapingConfig, domain: str) -> Mapping[str, float]:
    """Weights of the kinds of checks in a domain. Kinds without an entry in ``weights_by_domain``
    have their general weight."""
    return _settings(shaping, "weights") | _own_weights(shaping).get(domain, {})


def check_settings(
    shaping: ShapingConfig, domains: Collection[str], kinds: Collection[str] | None = None
) -> None:
    """Refuse settings of unknown domains, and weights of unknown kinds of checks: they would have
    no effect, unnoticed.

    Raises
    ------
    ConfigurationError
        Names the field, and the known names.
    """
    own, everywhere = _own_weights(shaping), _settings(shaping, "weights")
    named = [("alpha_by_domain", name) for name in _settings(shaping, "alpha_by_domain")]
    named += [("weights_by_domain", name) for name in own]
    for field, name in named:
        if name not in domains:
            raise _refused(
                f"{field}` names {name!r}, which is not a domain of the environment",
                f"one of: {', '.join(domains)}",
            )
    named = [("weights", k) for k in everywhere.keys() - _settings(ShapingConfig(), "weights")]
    named += [("weights_by_domain", kind) for weights in own.values() for kind in weights]
    for field, name in named:
        if kinds is not None and name not in kinds:
            raise _refused(
                f"{field}` names {name!r}, which is not a kind of check of the environment",
                f"kinds among {', '.join(kinds)}; a weight for one of its domains "
                f"({', '.join(domains)}) belongs in {_SHAPING}.weights_by_domain, as "
                "DOMAIN.KIND=WEIGHT",
            )


def _own_weights(shaping: ShapingConfig) -> dict[str, dict[str, float]]:
    """Domain -> kind -> weight."""
    own: dict[str, dict[str, float]] = {}
    for name, value in _settings(shaping, "weights_by_domain").items():
        domain, _, kind = name.rpartition(".")
        own.setdefault(domain, {})[kind] = value
    return own


def _settings(shaping: ShapingConfig, which: str) -> dict[str, float]:
    values = dict[str, float]()
    form = r"\S.*\.\S+" if which == "weights_by_domain" else r"\S.*"
    for text in getattr(shaping, which):
        name, _, number = (part.strip() for part in text.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not re.fullmatch(form, name) or name in values or not 0 <= value < math.inf:
            raise _refused(
                f"{which}` has {text!r}",
                f"{_FORMS[which]} each, a finite number of 0 or more, each name once",
            )
        values[name] = value
    return values


def _refused(what: str, expected: str) -> ConfigurationError:
    fix = f"correct {_SHAPING}.{what.partition('`')[0]}"
    return ConfigurationError(f"`{_SHAPING}.{what}.", expected=expected, fix=fix)


#: Environments with a name alone.
SHIPPED = ("desk", "tau2")


def check_name(name: str) -> None:
    """Refuse an impossible ``environment.name``; whether the file exists is checked later.

    Raises
    ------
    ConfigurationError
        It is neither shipped nor FILE.py:NAME.
    """
    file, _, attribute = name.rpartition(":")
    if name in SHIPPED or (file.endswith(".py") and attribute.isidentifier()):
        return
    raise ConfigurationError(
        f"There is no environment {name!r} (environment.name).{suggest(name, SHIPPED)}",
        expected="`desk`, `tau2`, or FILE.py:NAME of your own, where NAME is the class or function "
        "that makes it",
        fix="correct environment.name, or leave it empty for the refiner's task",
    )
