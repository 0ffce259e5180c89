"""Checks across fields, made when a plan is made: impossible sizes are refused with the numbers.

They use the recipe alone; limits of the machine are found at run time.

Checks of a `command` section: another trainer's texts, patterns and paths.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from urllib.parse import urlsplit

from refiner_core.contract.checks.environment import check_environment
from refiner_core.contract.checks.secrets import check_secrets
from refiner_core.contract.checks.training import check_training
from refiner_core.contract.config import LEXICAL_MODELS, RecipeConfig, placeholders
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import refuse_fields, suggest
from refiner_core.contract.kinds import kinds_of
from refiner_core.contract.marks import walk
from refiner_core.contract.monitoring import check_monitor
from refiner_core.contract.placement import STAGES
from refiner_core.contract.protocols import all_under, refused_under
from refiner_core.contract.sections.publish import LICENSES
from refiner_core.contract.sections.steering import VARIABLE, check_notify
from refiner_core.contract.services import asks_judge, serves

_FIELDS = dict(walk(RecipeConfig))
_VALUES = attrgetter(*_FIELDS)


def check_config(config: RecipeConfig) -> RecipeConfig:
    """``config`` itself; raises the first refusal.

    Raises
    ------
    ConfigurationError
        A value or a combination of values is impossible, or is a secret.
    """
    check_secrets(config)  # first, because other refusals repeat values
    _check_ranges(config)
    _check_data(config)
    _check_judge(config)
    _check_publish(config)
    _check_evaluate(config)
    check_environment(config)
    if "command" in config.stages:
        check_command(config)
    check_training(config)
    check_monitor(config)
    check_notify(config.notify)
    for name, measured in all_under(config).items():
        with refused_under(name):  # the fields of a protocol, in a recipe of its kind
            plain = RecipeConfig(stages=("data", "evaluate"), environment=measured.environment)
            parts = {part: getattr(measured, part) for part in ("data", "reward", "judge")}
            grpo = replace(plain.grpo, response_length=measured.grpo.response_length)
            _check_once(replace(plain, evaluate=measured.evaluate, grpo=grpo, **parts))
    return config


#: Thousands of trials share one protocol.
_check_once = functools.lru_cache(maxsize=64)(check_config)


def _check_ranges(config: RecipeConfig) -> None:
    """Refuse numbers outside their declared range, NaN and infinity."""
    for (path, info), value in zip(_FIELDS.items(), _VALUES(config), strict=True):
        finite = not isinstance(value, float) or math.isfinite(value)
        # None, where a field allows it, is "no limit" and not a number.
        if value is not None and not (finite and info.range.holds(value)):
            expected = info.range.words if finite else "a finite number"
            refuse_fields(config, True, path, expected, f"set {path}=… to such a value")


def _check_data(c: RecipeConfig) -> None:
    refuse = functools.partial(refuse_fields, c)
    rows = not c.environment.name
    refuse(
        rows and c.data.sft_path is None and "sft" in c.stages,
        "data.sft_path",
        "demonstrations to train on, because the recipe has an `sft` stage",
        "set data.sft_path=FILE, or drop `sft` from `stages`",
    )
    refuse(
        rows and c.data.rl_path is None and any(kind.on_prompts for kind in kinds_of(c.stages)),
        "data.rl_path",
        "prompts with rubrics, because the recipe trains or evaluates on prompts",
        "set data.rl_path=FILE",
    )
    refuse(
        c.data.all_held_out and {*STAGES} & {*c.stages},
        "data.all_held_out stages",
        "prompts to train on",
        "drop data.all_held_out; another set to evaluate on is named in a protocol file's `data`",
    )


#: Fields of a request to a judge that have a setting of their own, or must not be set.
_OWN_OF_BODY = frozenset(
    ("max_completion_tokens", "max_tokens", "messages", "model", "stream", "temperature")
)


def _check_judge(c: RecipeConfig) -> None:
    refuse = functools.partial(refuse_fields, c)
    judge, asked = c.judge, [a for a in (c.judge.base_url, *c.judge.base_urls) if a is not None]
    served = judge.kind == "openai"
    refuse(
        c.reward.instance_rubrics_only and c.reward.rubric_source in ("static", "none"),
        "reward.instance_rubrics_only reward.rubric_source",
        "rubric_source `instance` or `instance+static`: no rubric would be left",
    )
    refuse(
        served and asks_judge(c) and not (asked or serves(judge)),
        "judge.kind judge.base_url judge.serve.engine",
        "judge.base_url (a running server), or judge.serve.engine (one that refiner starts)",
        "set judge.base_url=http://127.0.0.1:8000/v1",
    )
    refuse(
        served == (judge.model in LEXICAL_MODELS),
        "judge.kind judge.model",
        f"{' or '.join(LEXICAL_MODELS)} for the lexical judge, and of a server the name by which "
        "it knows its model: judgements are recorded under it",
        "set judge.model=NAME, or judge.kind=openai and judge.base_url=http://127.0.0.1:8000/v1",
    )
    refuse(
        judge.serve.engine == "command" and not judge.serve_command,
        "judge.serve.engine judge.serve_command",
        "the command that serves the judge",
        "set e.g. judge.serve_command='vllm serve {model} --host {host} --port {port}'",
    )
    refuse(
        not _is_extra_body(judge.extra_body),
        "judge.extra_body",
        f"a JSON object, without {', '.join(sorted(_OWN_OF_BODY))}, which refiner sets itself",
        """set e.g. judge.extra_body='{"chat_template_kwargs": {"enable_thinking": false}}'""",
    )
    _check_server("judge", judge.api_key_env, asked)


def _is_extra_body(text: str) -> bool:
    try:
        value = json.loads(text.strip() or "{}")
    except ValueError:
        return False
    return isinstance(value, dict) and not _OWN_OF_BODY & value.keys()


def _check_server(section: str, variable: str, addresses: Iterable[str]) -> None:
    """Check a server's addresses and the variable of its key. Refusals do not repeat the values,
    which may be secrets."""
    if not VARIABLE.fullmatch(variable):
        raise ConfigurationError(
            f"`{section}.api_key_env` is not the name of an environment variable.",
            expected="a name such as OPENAI_API_KEY, never the key itself: fields are recorded",
            fix="put the key into the environment: export OPENAI_API_KEY=…",
        )
    if not all(map(_is_web_address, addresses)):
        raise ConfigurationError(
            f"`{section}.base_url` (or one of several) is not a server's address, or has a user, "
            "a password or a query.",
            expected="http:// or https://, a host, and no secret, because addresses are recorded",
            fix=f"set e.g. {section}.base_url=http://127.0.0.1:8000/v1, and put a key into the "
            f"environment variable that {section}.api_key_env names",
        )


def _is_web_address(text: str) -> bool:
    """Tell whether it is the address of an HTTP server, without user, password or query."""
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port  # each raises for an invalid value
    except ValueError:
        return False
    plain = not ("@" in parts.netloc or parts.query or parts.fragment)
    return parts.scheme in ("http", "https") and bool(host) and plain


def _check_publish(c: RecipeConfig) -> None:
    refuse = functools.partial(refuse_fields, c)
    publish = c.publish
    values = {"recipe": c.recipe, "seed": c.seed, "step": 1, "fingerprint": "0" * 8}
    try:
        repository = publish.repo_id.format(**values)
    except (ValueError, LookupError, AttributeError):
        repository = ""
    refuse(
        any(part in ("", ".", "..") for part in repository.split("/")),
        "recipe publish.repo_id",
        "names joined by single slashes, none of them empty, `.` or `..`, with no placeholders but "
        "{recipe}, {seed}, {step} and {fingerprint}",
        "set e.g. publish.repo_id=me/my-model, and the folder above it with publish.path=DIR",
    )
    if publish.license not in LICENSES:
        near = suggest(publish.license.lower().replace(" ", "-"), LICENSES)
        refuse(
            True,
            "publish.license",
            "a licence of the Hub's list, as apache-2.0, mit, cc-by-4.0, llama3.1, or `other`."
            f"{near}",
            "set publish.license=other for a licence of another name, and name it in a card of "
            "your own (publish.card_template)",
        )
    by_step = publish.per_step == "repository" and publish.which not in ("final", "best")
    refuse(
        by_step and "{step}" not in publish.repo_id,
        "publish.per_step publish.repo_id",
        "a repository for each step",
        "write {step} into publish.repo_id, or set publish.per_step=tag",
    )


def _check_evaluate(c: RecipeConfig) -> None:
    refuse = functools.partial(refuse_fields, c)
    for name in ("models", "decoding") if "evaluate" in c.stages else ():
        values = getattr(c.evaluate, name)
        refuse(
            not 0 < len(values) == len(set(values)),
            f"evaluate.{name}",
            "at least one, and each at most once",
            f"correct evaluate.{name}, or drop `evaluate` from `stages`",
        )
    for where, user in (("environment", c.environment.user), ("evaluate", c.evaluate.user)):
        refuse(
            user.base_url and not user.model,
            f"{where}.user.base_url {where}.user.model",
            "the name by which the endpoint knows the model",
            f"set {where}.user.model=NAME",
        )
        _check_server(f"{where}.user", user.api_key_env, [user.base_url] if user.base_url else [])


_COMPLETE = re.compile(r"weights|file:(?!/)(?!(.*/)?\.\.(/|$)).+|quiet:(?=.*[1-9])\d+(\.\d*)?")
_EVERYWHERE = ("output", "seed", "data", "model", "workdir")
_PLACEHOLDERS = {
    "run": (*_EVERYWHERE, "resume"),
    "resume_arguments": (*_EVERYWHERE, "checkpoint"),
    "companions": ("model",),
    "env": _EVERYWHERE,
}


def check_command(config: RecipeConfig) -> None:
    """Refuse a `command` section that cannot work, naming the field."""
    refuse = functools.partial(refuse_fields, config)
    command = config.command
    refuse(
        bool(command.run.strip()) == bool(command.adopted),
        "command.run command.adopted",
        "the shell command that trains (or weights that were adopted, not both)",
        "set command.run='python train.py --out {output} {resume}'",
    )
    for name, known in _PLACEHOLDERS.items():
        value = getattr(command, name)
        texts = value if isinstance(value, tuple) else (value,)
        refuse(
            any({*placeholders(text)} - {*known} for text in texts),
            f"command.{name}",
            "no placeholder but " + ", ".join(f"{{{k}}}" for k in known),
            "correct it, or write {{…}} where braces are meant",
        )
    resumes = "checkpoint" in placeholders(command.resume_arguments)
    refuse(
        command.resume_arguments and not ("resume" in placeholders(command.run) and resumes),
        "command.run command.resume_arguments",
        "{resume} in command.run, and {checkpoint} in command.resume_arguments: they would never "
        "reach the trainer",
        "set e.g. command.run='python train.py {resume}' and "
        "command.resume_arguments='--resume_from {checkpoint}'",
    )
    for name, least in (("step_pattern", 1), ("progress_pattern", 0)):
        refuse(
            _groups(getattr(command, name)) < least,
            f"command.{name}",
            "a Python regular expression" + (" with a group around the number" if least else ""),
            f"correct command.{name}, e.g. `ckpt_(\\d+)`",
        )
    refuse(
        not _COMPLETE.fullmatch(command.complete),
        "command.complete",
        "`weights`, `file:NAME` (a name inside the checkpoint) or `quiet:SECONDS`",
        "set e.g. command.complete=file:trainer_state.json",
    )
    for name, example in (("checkpoints", "ckpt_*"), ("exports", "final")):
        text = getattr(command, name)
        refuse(
            not text or text.startswith(("/", "~")) or ".." in text.split("/"),
            f"command.{name}",
            "a path below {output}, not an absolute one",
            f"set e.g. command.{name}={example}",
        )
    refuse(
        not all(re.match(r"[A-Za-z_]\w*=", setting) for setting in command.env),
        "command.env",
        "NAME=VALUE each",
    )


def _groups(pattern: str) -> int:
    """Number of groups of a regular expression; -1 if it is invalid."""
    try:
        return re.compile(pattern).groups
    except re.error:
        return -1
