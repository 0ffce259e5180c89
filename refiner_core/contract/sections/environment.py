"""Section `environment`: what an agent with tools works in, its user, partial credit as numbers.

A recipe whose ``environment.name`` is empty is the refiner's: one prompt, one answer. With a name,
every prompt is a *task* and every rollout an *episode*: turns of the model, answered by tools and a
user. Formulas stand in ``refiner_core/environments/README.md``. Three fields of GRPO then mean
this: ``grpo.response_length`` is the largest number of sampled tokens of *one turn*,
``grpo.max_token_length`` the context limit of the whole episode, and ``grpo.stop_strings`` are not
used (a turn ends at ``</tool_call>``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Literal

from pydantic.dataclasses import dataclass

from refiner_core.contract.errors import ConfigurationError, suggest
from refiner_core.contract.marks import STRICT, added, execution, section
from refiner_core.contract.sections.steering import of_server


@dataclass(frozen=True, config=STRICT)
class UserConfig:
    """The user whom an agent talks to, where it is a model (environments may bring their own)."""

    model: str = added(
        "",
        doc="model of the simulated user at an OpenAI-compatible endpoint; empty is the "
        "environment's own scripted user, where it has one",
    )
    base_url: str = execution("", doc="its endpoint, e.g. `http://127.0.0.1:8000/v1`")
    api_key_env: str = execution(
        "OPENAI_API_KEY", doc="environment variable that holds its key; a key stands nowhere else"
    )
    temperature: float = added(0.7, ge=0, le=10, doc="its sampling temperature")
    max_tokens: int = added(512, ge=1, doc="longest message of the user (tokens)")
    timeout_s: float = execution(60.0, gt=0, doc="how long one request may take, seconds")
    max_retries: int = execution(5, ge=0, doc="tries after a first one that failed")


@dataclass(frozen=True, config=STRICT)
class ShapingConfig:
    """Partial credit: ``reward + alpha x partial``, where partial is the weighted share of checks
    that passed, renormalised over the kinds of checks that a task has."""

    alpha: float = added(0.25, ge=0, doc="weight of partial credit in training")
    alpha_by_domain: tuple[str, ...] = added(
        (), doc="factors on alpha by domain, `NAME=FACTOR` each; 1 where none"
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
    """What an agent works in; see :mod:`refiner_core.environments`."""

    name: str = added(
        "",
        doc="`desk` (shipped), `tau2` (where it is installed), or FILE.py:NAME of your own; empty "
        "is the refiner's task without tools",
    )
    domains: tuple[str, ...] = added((), doc="domains that are used; none is all")
    train_split: str = added("train", doc="split of the training tasks")
    test_split: str = added("test", doc="split of the held-out tasks")
    tasks: str | None = added(None, doc="file of tasks in the place of the environment's own")
    max_train_tasks: int | None = added(None, ge=1, doc="use at most this many training tasks")
    demonstrations: int = added(
        0,
        ge=0,
        doc="demonstrations that the environment's own expert makes for SFT, where it has one and "
        "data.sft_path names no file",
    )
    flawed_demonstrations: float = added(
        0.0, ge=0, le=1, doc="share of those demonstrations in which the expert makes a mistake"
    )
    max_turns: int = added(100, ge=1, doc="turns of the agent in an episode")
    repairs: Literal[0, 1] = added(
        1, doc="further attempts, at temperature 0, at a turn that is no tool call"
    )
    unparsable: Literal["failure", "exclude"] = added(
        "failure",
        doc="an episode that ends with a turn that is no tool call: a failure, or left out of "
        "training as the reference does (survivorship bias); in evaluation it is a failure",
    )
    max_argument_bytes: int = added(
        65536, ge=16, doc="a tool call with longer arguments is refused, bytes"
    )
    nl_assertions: Literal["exclude", "judge"] = added(
        "exclude",
        doc="assertions in plain language: left out of the reward, which is said, or asked of the "
        "recipe's judge",
    )
    schedule: Literal["auto", "ordered", "eager"] = added(
        "auto",
        doc="when a turn begins: `ordered`, at a step of decoding that the episodes alone decide "
        "(bitwise repeatable); `eager`, as soon as its tools have answered; `auto`: ordered where "
        "the environment is deterministic",
    )
    turn_timeout_s: float = execution(
        300.0,
        gt=0,
        doc="how long tools and user may take over one turn before that is an error of the "
        "infrastructure, seconds",
    )
    episode_timeout_s: float = execution(
        3600.0, gt=0, doc="the same of a whole episode, without the model's own turns, seconds"
    )
    workers: int = execution(16, ge=1, le=4096, doc="tools and users that are at work at a time")
    max_error_share: float = execution(
        0.5,
        ge=0,
        le=1,
        doc="share of a step's (or an evaluation's) episodes that errors of the infrastructure may "
        "end before the stage stops, resumable",
    )
    user: UserConfig = section(UserConfig, doc="the user in training")
    shaping: ShapingConfig = section(ShapingConfig, doc="partial credit")


_SHAPING = "environment.shaping"


def check_shaping(shaping: ShapingConfig) -> None:
    """Refuse partial credit that cannot be meant.

    Raises
    ------
    ConfigurationError
        A setting is not ``NAME=VALUE``, stands twice, is negative or not finite, or all weights of
        a domain are 0.
    """
    _settings(shaping, "alpha_by_domain")
    _settings(shaping, "weights")
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


def alpha_of(shaping: ShapingConfig, domain: str) -> float:
    """How much a domain's partial score counts: ``alpha`` times the domain's factor, 1 where it has
    none."""
    return shaping.alpha * _settings(shaping, "alpha_by_domain").get(domain, 1.0)


def check_weights(shaping: ShapingConfig, domain: str) -> Mapping[str, float]:
    """Weights of the kinds of checks in a domain. A kind that ``weights_by_domain`` does not name
    for it has the weight that it has everywhere."""
    return _settings(shaping, "weights") | _own_weights(shaping).get(domain, {})


def check_domains(shaping: ShapingConfig, known: Collection[str]) -> None:
    """Refuse settings of domains that an environment does not have.

    Raises
    ------
    ConfigurationError
        Names the field and the domains that there are.
    """
    factors = _settings(shaping, "alpha_by_domain")
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
    defaults = _settings(ShapingConfig(), "weights")
    named = [("weights", kind) for kind in _settings(shaping, "weights") if kind not in defaults]
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
    own: dict[str, dict[str, float]] = {}
    for name, value in _settings(shaping, "weights_by_domain").items():
        domain, dot, kind = name.rpartition(".")
        if not dot or not domain or not kind:
            raise _unreadable("weights_by_domain", f"{name}={value:g}")
        own.setdefault(domain, {})[kind] = value
    return own


#: How each setting of partial credit is written.
_FORMS = {
    "alpha_by_domain": "NAME=FACTOR",
    "weights": "KIND=WEIGHT",
    "weights_by_domain": "DOMAIN.KIND=WEIGHT",
}


def _settings(shaping: ShapingConfig, which: str) -> dict[str, float]:
    field, values = f"{_SHAPING}.{which}", dict[str, float]()
    for text in getattr(shaping, which):
        name, equals, number = (part.strip() for part in text.partition("="))
        try:
            value = float(number)
        except ValueError:
            raise _unreadable(which, text) from None
        if not name or not equals:
            raise _unreadable(which, text)
        if name in values:
            raise ConfigurationError(
                f"`{field}` has {name} twice ({values[name]:g} and {value:g}).",
                expected="each name once",
                fix=f"remove one of them from {field}",
            )
        if not math.isfinite(value) or value < 0:
            raise ConfigurationError(
                f"`{field}: {name}` is {value:g}.",
                expected="a finite number, 0 or more",
                fix=f"correct {field}: {name}",
            )
        values[name] = value
    return values


def _unreadable(which: str, text: str) -> ConfigurationError:
    return ConfigurationError(
        f"`{_SHAPING}.{which}` has {text!r}.",
        expected=f"{_FORMS[which]}, a number after the sign",
        fix=f"correct {_SHAPING}.{which}",
    )


#: Environments that go by a name alone.
SHIPPED = ("desk", "tau2")


def check_name(name: str) -> None:
    """Refuse what ``environment.name`` cannot be; whether there is such a file is seen later.

    Raises
    ------
    ConfigurationError
        It is neither shipped nor FILE.py:NAME.
    """
    file, colon, attribute = name.rpartition(":")
    if name in SHIPPED or (file.endswith(".py") and colon and attribute.isidentifier()):
        return
    if name.rstrip(":").endswith(".py") or file.endswith(".py"):
        begun = (file or name).rstrip(":")
        raise ConfigurationError(
            f"There is no environment {name!r} (environment.name): a file has several.",
            expected="FILE.py:NAME, where NAME is the class or function that makes it",
            fix=f"write e.g. {begun}:Environment",
        )
    raise ConfigurationError(
        f"There is no environment {name!r} (environment.name).{suggest(name, SHIPPED)}",
        expected="`desk`, `tau2`, or FILE.py:NAME of your own",
        fix="correct environment.name, or leave it empty for the refiner's task",
    )


def check_user(where: str, user: UserConfig) -> None:
    """Refuse a user whose model cannot be asked; ``where`` is the section that it stands in."""
    if user.base_url and not user.model:
        raise ConfigurationError(
            f"`{where}.user.base_url` is set, but `{where}.user.model` is empty.",
            expected="the name by which the endpoint knows the model",
            fix=f"set {where}.user.model=NAME",
        )
    addresses = [user.base_url] if user.base_url else []
    for what, expected, fix in of_server(f"{where}.user", user.api_key_env, addresses):
        raise ConfigurationError(what, expected=expected, fix=fix)
