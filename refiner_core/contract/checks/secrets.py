"""Detection of secrets by name and by form, and the check that no setting has one.

In: names, texts, a configuration. Out: whether a name is a secret's, where a text gives a value to
such a name, and a refusal that names the field. Settings are recorded, shown and published; secrets
stay in the environment. Masking of texts (:mod:`infra.host.secrets`), profiles and cards use the
same list.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.marks import walk
from refiner_core.contract.protocols import PROTOCOL_FIELDS

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
#: The last word of a name decides: `HUB_TOKEN` is a secret, `MAX_TOKEN_LENGTH` is not.
_LAST = frozenset(
    (
        *("token", "secret", "password", "passwd", "passphrase", "pass"),
        *("credential", "credentials", "auth", "authorization", "webhook"),
    )
)
_ENDINGS = ("apikey", "accesskey", "secretkey", "password", "passwd", "secret", "authtoken")
#: Keys that are secrets; `input_key` names a column. A variable in capitals counts in any case.
_KEYS = frozenset(
    (
        *("api", "access", "secret", "private", "auth", "account", "service", "signing", "master"),
        *("encryption", "storage", "ssh", "session", "license", "subscription", "admin"),
    )
)
#: Tokens that belong to models.
_OF_MODELS = frozenset(
    (
        *("pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop", "start", "end", "special"),
        *("image", "video", "audio", "think", "per", "max", "min", "first", "last", "next", "each"),
    )
)

_NAME = re.compile(r"(?<![\w.-])-{0,2}[A-Za-z_][\w.-]*+")
_GIVEN = re.compile(
    r"""(?:\\*["'])?(?P<sign>=(?=\S)|[ \t]++=[ \t]*+|[ \t]*+:[ \t]*+|\s++)(?:\\*["'])?"""
    r"""(?P<value>(?:(?i:bearer|basic)[ \t]++)?+[^\s,;'"]++)"""
)
#: Values that are no secrets: numbers, words of configuration, references, and masked values.
_NO_VALUE = re.compile(r"(?i)[-+]?\d{1,6}(?:\.\d+)?|true|false|null|none|yes|no|auto|x+|[.…*]+")
_REFERENCES = ("$", "{", "[", "<", "`", "%", "(", "@")

_LOOKS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{40,}|A[KS]IA[A-Z0-9]{16}"
    r"|xox[baprs]-[A-Za-z0-9-]{20,}|glpat-[\w-]{20,}|[a-f0-9]{40}:[a-f0-9]{8,})"
    r"|(?<![\w-])(?:sk-(?=[A-Za-z_-]*+\d)[A-Za-z0-9_-]{20,}"
    r"|eyJ[\w-]{10,}+\.eyJ[\w-]{10,}+\.[\w-]{10,})"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----|(?<=://hooks\.slack\.com/services/)\w+/\w+/\w+"
)
_LOGIN = re.compile(r"(?<=://)[^/\s@]++@")


class SecretAssignment(NamedTuple):
    """A value assigned to a secret's name in a text, and its position. ``is_set``: assigned by
    ``=``, ``:`` or a flag, not only adjacent."""

    name: str
    value: str
    start: int
    is_set: bool


def is_secret_name(name: str) -> bool:
    """Tell whether a variable, field, flag or header of this name is a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    before, last = ["", *words][-2:]
    if last == "token":
        return before not in _OF_MODELS
    if last == "pwd":  # DB_PWD; PWD and OLDPWD are folders of the shell
        return before not in ("", "old") and name.upper() != "OLDPWD"
    if last == "key":
        return name.isupper() or before in _KEYS
    return last in _LAST or last.endswith(_ENDINGS) or (before, last) == ("auth", "string")


def assigned_secrets(text: str) -> Iterator[SecretAssignment]:
    """Positions of ``TOKEN=…``, ``--api-key …``, ``"password": "…"`` and the like in a text, except
    numbers and references such as ``$TOKEN``. Linear in the text."""
    for found in _NAME.finditer(text):
        given = _GIVEN.match(text, found.end()) if is_secret_name(found.group()) else None
        if given is None or _NO_VALUE.fullmatch(given["value"]):
            continue
        if not given["value"].startswith(_REFERENCES):
            is_set = bool(given["sign"].strip()) or found.group().startswith("-")
            yield SecretAssignment(
                found.group().lstrip("-"), given["value"], given.start("value"), is_set
            )


def has_secret(text: str) -> bool:
    """Tell whether a text contains an access token or key; `hf_xxxxxxxx…` is none."""
    return any(len(set(m.group())) > 8 for m in _LOOKS.finditer(text))


# ---------------------------------------------------------------- settings

_RUNS_COMMANDS = ("python", "setup", "container", "args")
#: Settings with free text.
_FREE = frozenset(
    (
        *("command.run", "command.resume_arguments", "command.env", "notify.command"),
        *("judge.extra_body", "judge.base_url", "judge.base_urls", "judge.serve_command"),
        *("environment.user.base_url", "evaluate.user.base_url", "disk.probe"),
        *(f"judge.serve.{name}" for name in _RUNS_COMMANDS),
        *(f"grpo.rollout_server.{name}" for name in _RUNS_COMMANDS),
    )
)
#: Of code within a command: `token=read(path)`.
_CODE = frozenset("([")
_TEXTS = (str, str | None, tuple[str, ...])


def key_variables(config: RecipeConfig) -> frozenset[str]:
    """Environment variables that a configuration names as secrets."""
    paths = ("judge.api_key_env", "environment.user.api_key_env", "evaluate.user.api_key_env")
    named = [*(get_field(config, path) for path in paths), *config.notify.urls]
    return frozenset(name for name in (*named, config.notify.webhook) if name)


def check_secrets(config: RecipeConfig) -> None:
    """Refuse a configuration with a secret in it, naming the field and not repeating the secret."""
    for path in _text_fields():
        value = get_field(config, path)
        texts = value or () if isinstance(value, tuple) else (value or "",)
        if path.endswith(".args"):
            texts = (" ".join(texts),)  # a flag and its value may be two elements
        for text in texts:
            if what := _secret_in(text, path in _FREE):
                raise ConfigurationError(
                    f"`{path}` holds {what}, which looks like a secret.",
                    expected="settings that everyone may read: they are recorded with the run",
                    fix=_fix(path),
                )


@functools.cache
def _text_fields() -> tuple[str, ...]:
    """Fields of text; protocols are left out, since their settings are checked as recipes."""
    texts = (path for path, info in walk(RecipeConfig) if info.type in _TEXTS)
    return tuple(path for path in texts if path not in PROTOCOL_FIELDS)


@functools.lru_cache(maxsize=1024)
def _secret_in(text: str, is_free: bool) -> str:
    """The secret in a text, in words; empty if there is none. Cached: thousands of trials share
    most of their texts."""
    for given in assigned_secrets(text) if is_free else ():
        if given.is_set and not _CODE & set(given.value):
            return f"a value for {given.name}"
    if _LOGIN.search(text):
        return "a user or password in an address"
    return "an access token or key" if has_secret(text) else ""


def _fix(path: str) -> str:
    section = path.rpartition(".")[0]
    if path.startswith("judge.extra_body") or "base_url" in path:
        named = f"{section}.api_key_env"
        return f"export it before you call refiner, and name the variable in {named}"
    if path in ("judge.serve_command", "judge.serve.args", "grpo.rollout_server.args"):
        return "leave it out: a server that refiner starts gets its own key in REFINER_SERVER_KEY"
    return "export it as a variable before you call refiner (jobs inherit it), and omit it here"
