"""Texts without credentials.

In: what a library, a server or a person has said. Out: the same with tokens, signed addresses and
passwords in addresses masked, wherever they come from; settings that people put tokens into are
left out whole.
"""

from __future__ import annotations

import os
import re

MASK = "***"
#: Instead of a setting's value that nobody is to see.
HIDDEN = "(not shown)"
#: Settings whose values people put tokens into, whatever they are asked to do.
_CARRIERS = ("command.env", "judge.extra_body", "notify.webhook", "notify.command")
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
#: Variables of the environment that hold a secret, by their names.
_VARIABLE = re.compile(r"(?i)(?:.*_)?(?:token|secret|password|passwd|api_?key|webhook)")
_SHORTEST = 6
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
#: ``TOKEN=…``, ``--api-key …``, ``"password": "…"`` and the like within a text.
_NAMED = re.compile(
    r"""(?i)([\w-]*(?:token|secret|passw(?:or)?d|api[_-]?key)["']?(?:=|\s+|:\s*)["']?)"""
    r"""([^\s,;'"]+)"""
)
#: Names of settings that match and say how many or which, not what.
_COUNTS = re.compile(
    r"""(?i)(?:max_\w*tokens?\w*|\w*token_length|\w+_env|\w*tokens_\w+)["']?(?:=|\s+|:\s*)["']?"""
)


def masked(text: str) -> str:
    """``text`` without credentials: those that are known here, and what looks like one."""
    for name, value in os.environ.items():
        known = _VARIABLE.fullmatch(name) and len(value.strip()) >= _SHORTEST
        text = text.replace(value.strip(), MASK) if known else text
    for secret in _SECRETS:
        text = secret.sub(MASK, text)
    return text


# ---------------------------------------------------------------- settings


def carries_secrets(field: str) -> bool:
    """Whether people put tokens into a setting, named with dots; a part of one counts."""
    return any(field == c or field.startswith((f"{c}.", f"{c}[")) for c in _CARRIERS)


def without_secrets(text: str) -> str:
    """What somebody has set, without logins in addresses, nor what looks like a token."""
    text = _NAMED.sub(
        lambda m: m.group() if _COUNTS.fullmatch(m.group(1)) else m.group(1) + HIDDEN,
        _LOGIN.sub("", text),
    )
    return masked(text)


def shown_override(word: str) -> str:
    """``key=value`` without secrets."""
    key, equals, _ = word.partition("=")
    hidden = equals and carries_secrets(key.lstrip("+~"))
    return f"{key}={HIDDEN}" if hidden else without_secrets(word)
