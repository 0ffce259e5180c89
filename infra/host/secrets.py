"""Texts without credentials.

In: a text from a library, a server or a person. Out: the same with tokens, signed addresses and
passwords in addresses masked, wherever they come from; settings that often contain tokens are
left out whole. :mod:`refiner_core.contract.checks.secrets` defines the names of secrets.
"""

from __future__ import annotations

import re

from infra.host.processes import environment
from refiner_core.contract.checks.secrets import assigned_secrets, is_secret_name, key_variables
from refiner_core.contract.config import RecipeConfig

MASK = "***"
#: Placeholder for a hidden value of a setting.
HIDDEN = "(not shown)"
#: Settings that often contain tokens, despite all advice.
_CARRIERS = ("command.env", "judge.extra_body", "notify.urls", "notify.webhook", "notify.command")
_SECRETS = (
    re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{6,}"),
    re.compile(r"\b(?:sk-|ghp_|github_pat_|glpat-|xox[a-z]-)[\w-]{8,}"),
    re.compile(r"(?<=://hooks\.slack\.com/services/)[^\s'\"]+"),
    re.compile(r"(?i)(?<=bearer )[^\s'\"]+"),
    re.compile(r"(?<=://)[^/\s@]+(?=@)"),
    re.compile(
        r"(?i)(?<=[?&;])(?:x-amz-[a-z-]+|signature|sig|token|policy|key-pair-id)=[^&\s'\"]+"
    ),
)
_SHORTEST = 6
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
#: Variables with a secret whose names do not show it; see :func:`mask_keys_of`.
_also: set[str] = set()


def mask_keys_of(config: RecipeConfig) -> None:
    """From now on mask the values of the variables that a configuration names as keys
    (``judge.api_key_env``), whatever their names."""
    _also.update(key_variables(config))


def masked(text: str) -> str:
    """``text`` without credentials: known ones, and everything that looks like one."""
    for value in sorted(_known(), key=len, reverse=True):
        text = text.replace(value, MASK)
    for secret in _SECRETS:
        text = secret.sub(MASK, text)
    return text


def _known() -> set[str]:
    """Values of this process's own secrets."""
    known = environment().items()
    values = {v.strip() for name, v in known if name in _also or is_secret_name(name)}
    return {value for value in values if len(value) >= _SHORTEST}


# ---------------------------------------------------------------- settings


def carries_secrets(field: str) -> bool:
    """True if a setting, named with dots, often contains tokens; a part of one counts."""
    return any(field == c or field.startswith((f"{c}.", f"{c}[")) for c in _CARRIERS)


def without_secrets(text: str) -> str:
    """A user's text without logins in addresses, and without apparent tokens."""
    text, parts, at = masked(_LOGIN.sub("", text)), [], 0
    for given in assigned_secrets(text):
        if given.start >= at and (given.is_set or not given.value.isalpha()):
            parts += [text[at : given.start], HIDDEN]
            at = given.start + len(given.value)
    return "".join([*parts, text[at:]])


def masked_override(word: str) -> str:
    """``key=value`` without secrets."""
    key, equals, _ = word.partition("=")
    hidden = equals and carries_secrets(key.lstrip("+~"))
    return f"{key}={HIDDEN}" if hidden else without_secrets(word)
