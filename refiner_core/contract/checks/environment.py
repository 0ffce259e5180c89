"""Checks of the tool-use lane, made when a plan is made; partial credit and curriculum as numbers.

In: a configuration, ``NAME=VALUE`` settings of the sections ``environment.shaping`` and
``grpo.curriculum``. Out: numbers, or the first refusal. What an environment itself cannot do (a
domain that it does not have, a user without an endpoint) is refused where it is opened.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from urllib.parse import urlsplit

from refiner_core.contract.config import RecipeConfig, UserConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.marks import walk
from refiner_core.contract.steering_config import VARIABLE
from refiner_core.contract.training_config import CurriculumConfig, ShapingConfig

_SHAPING, _CURRICULUM = "environment.shaping", "grpo.curriculum"


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


def check_curriculum(curriculum: CurriculumConfig) -> None:
    """Refuse a curriculum that cannot be meant.

    Raises
    ------
    ConfigurationError
        Names the field.
    """
    if not 0 <= curriculum.low <= curriculum.high <= 1:
        raise ConfigurationError(
            f"`{_CURRICULUM}.low` is {curriculum.low}, and `{_CURRICULUM}.high` {curriculum.high}.",
            expected="shares with 0 <= low <= high <= 1",
            fix=f"set {_CURRICULUM}.low=0.25 and {_CURRICULUM}.high=0.75",
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


#: In the place of a source of rows: what the environment itself has.
BUILTIN_ROWS = "builtin:synthetic"
#: Environments that go by a name alone.
SHIPPED = ("desk", "tau2")
#: Fields that mean nothing without an environment, or nothing with one.
ONLY_OF_AGENTS = ("environment.", "evaluate.user.", "grpo.curriculum.", "grpo.credit")
_NOT_OF_AGENTS = (
    "data.rl_path",
    "data.rl_split",
    "data.rl_revision",
    "data.held_out_fraction",
    "data.refiner_mode",
    "data.max_rl_rows",
    "data.synthetic_sft_rows",
    "data.synthetic_rl_rows",
    "data.all_held_out",
    "grpo.stop_strings",
)


_DEFAULTS = {path: info.default for path, info in walk(RecipeConfig)}
_OF_AGENTS = tuple(p for p in _DEFAULTS if p.startswith(ONLY_OF_AGENTS))


def check_environment(config: RecipeConfig) -> None:
    """Refuse what cannot be meant.

    Raises
    ------
    ConfigurationError
        A value is impossible, or is set where it means nothing.
    """
    if not config.environment.name:
        _refuse_without(config)
        return
    _check_splits(config)
    check_shaping(config.environment.shaping)
    check_name(config.environment.name)
    _refuse_with(config)
    _check_demonstrations(config)
    _check_user("environment", config.environment.user)
    _check_user("evaluate", config.evaluate.user)
    _check_user_of_tau2(config)
    check_curriculum(config.grpo.curriculum)


def _refuse_without(config: RecipeConfig) -> None:
    """A recipe without an environment that sets something of one means another recipe."""
    for path in _OF_AGENTS:
        value = get_field(config, path)
        if value != _DEFAULTS[path]:
            raise ConfigurationError(
                f"`{path}` is {_shown(value)}, but the recipe has no environment.",
                expected="environment.name, or the default of what only an agent's recipe has",
                fix=f"set environment.name=desk (or another), or drop {path}",
            )


def _refuse_with(config: RecipeConfig) -> None:
    for path in _NOT_OF_AGENTS:
        value = get_field(config, path)
        if value != _DEFAULTS[path] and not (path == "data.rl_path" and value is None):
            raise ConfigurationError(
                f"`{path}` is {_shown(value)}, which means nothing with environment.name="
                f"{config.environment.name}.",
                expected="tasks and splits of the environment (environment.tasks, "
                "environment.train_split, environment.test_split, environment.max_train_tasks)",
                fix=f"drop {path}",
            )


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


def _check_splits(config: RecipeConfig) -> None:
    if config.environment.train_split == config.environment.test_split:
        raise ConfigurationError(
            "`environment.train_split` and `environment.test_split` are both "
            f"{config.environment.test_split!r}: the tasks of training are no test of it.",
            expected="two splits that share no task",
            fix="set environment.test_split to another one",
        )


def _check_demonstrations(config: RecipeConfig) -> None:
    environment, own_rows = config.environment, config.data.sft_path in (None, BUILTIN_ROWS)
    if "sft" in config.stages and own_rows and not environment.demonstrations:
        raise ConfigurationError(
            "The recipe has an `sft` stage, but no demonstrations: data.sft_path names no file, "
            "and environment.demonstrations is 0.",
            expected="conversations to learn from",
            fix="set environment.demonstrations=500 (where the environment has an expert), or "
            "data.sft_path=FILE",
        )
    if environment.demonstrations and not own_rows:
        raise ConfigurationError(
            f"Demonstrations come from data.sft_path={config.data.sft_path}, and "
            f"environment.demonstrations is {environment.demonstrations}.",
            expected="one source of demonstrations",
            fix="drop one of the two",
        )


def _check_user(where: str, user: UserConfig) -> None:
    if user.base_url and not user.model:
        raise ConfigurationError(
            f"`{where}.user.base_url` is set, but `{where}.user.model` is empty.",
            expected="the name by which the endpoint knows the model",
            fix=f"set {where}.user.model=NAME",
        )
    addresses = [user.base_url] if user.base_url else []
    for what, expected, fix in of_server(f"{where}.user", user.api_key_env, addresses):
        raise ConfigurationError(what, expected=expected, fix=fix)


#: What is wrong, what was expected, and what mends it.
Refusal = tuple[str, str, str]


def of_server(section: str, variable: str, addresses: Iterable[str]) -> Iterator[Refusal]:
    """What is wrong with where a server is asked, and with the name of its key's variable."""
    if not VARIABLE.fullmatch(variable):
        yield (
            f"`{section}.api_key_env` is no name of an environment variable.",
            "a name such as OPENAI_API_KEY, never the key itself: fields are recorded",
            "put the key into the environment: export OPENAI_API_KEY=…",
        )
    if not all(map(is_web_address, addresses)):
        yield (
            f"`{section}.base_url` (or one of several) is no address of a server, or holds a user, "
            "a password or a query.",
            "http:// or https://, a host, and no secret, because addresses are recorded",
            f"set e.g. {section}.base_url=http://127.0.0.1:8000/v1, and put a key into the "
            f"environment variable that {section}.api_key_env names",
        )


def is_web_address(text: str) -> bool:
    """Say whether it names a server over HTTP, and holds no user, password or query."""
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port  # each raises for what it cannot be
    except ValueError:
        return False
    plain = not ("@" in parts.netloc or parts.query or parts.fragment)
    return parts.scheme in ("http", "https") and bool(host) and plain


def _check_user_of_tau2(config: RecipeConfig) -> None:
    if config.environment.name == "tau2" and not config.environment.user.model:
        raise ConfigurationError(
            "`environment.user.model` is empty, and tau2-bench has no user without a model.",
            expected="a simulated user at an OpenAI-compatible endpoint",
            fix="set environment.user.model=NAME and environment.user.base_url=…",
        )


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value)
