"""Checks across fields, made when a plan is made: impossible sizes are refused with the numbers.

Each check is one row of :data:`CHECKS`: a condition that must hold, what to say when it does not,
and which field mends it. Nothing here looks at the world; what the machine lacks is found at run
time.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from refiner_core.contract.checks.environment import check_environment
from refiner_core.contract.checks.secrets import check_secrets
from refiner_core.contract.checks.training import check_sampling, check_training
from refiner_core.contract.config import (
    LEXICAL_MODELS,
    DataConfig,
    EnvironmentConfig,
    EvaluateConfig,
    JudgeConfig,
    RecipeConfig,
    RewardConfig,
    placeholders,
)
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.kinds import kinds_of
from refiner_core.contract.marks import walk
from refiner_core.contract.placement import STAGES
from refiner_core.contract.protocols import configs_under, refused_under
from refiner_core.contract.services import asks_judge, serves
from refiner_core.contract.steering_config import is_place

_OPEN = (
    "apache-2.0 mit afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear "
    "ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 isc "
    "lgpl lgpl-2.1 lgpl-3.0 lgpl-lr lppl-1.3c ms-pl mpl-2.0 ncsa ofl-1.1 openmdw-1.0 osl-3.0 "
    "postgresql unlicense wtfpl zlib"
)
_CREATIVE_COMMONS = (
    "cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 "
    "cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 "
    "cc-by-nc-sa-3.0 cc-by-nc-sa-4.0"
)
_OF_DATA = "c-uda cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 odc-by odbl pddl"
_OF_MODELS = (
    "openrail openrail++ bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 "
    "bigcode-openrail-m apple-ascl apple-amlr deepfloyd-if-license "
    "fair-noncommercial-research-license h-research intel-research gemma grok2-community llama2 "
    "llama3 llama3.1 llama3.2 llama3.3 llama4"
)
LICENSES = frozenset(
    " ".join((_OPEN, _CREATIVE_COMMONS, _OF_DATA, _OF_MODELS, "unknown other")).split()
)


def check_command(config: RecipeConfig) -> None:
    """Refuse a `command` section that cannot work, naming the field."""
    if "command" not in config.stages:
        return
    command = config.command
    if bool(command.run.strip()) == bool(command.adopted):
        both = "both `command.run` and `command.adopted`" if command.adopted else "no command"
        raise ConfigurationError(
            f"The recipe has a `command` stage and {both}.",
            expected="the shell command that trains (or weights that were adopted, not both)",
            fix="set command.run='python train.py --out {output} {resume}'",
        )
    _check_placeholders(config)
    for name in ("step_pattern", "progress_pattern"):
        _check_pattern(f"command.{name}", getattr(command, name))
    if not re.compile(command.step_pattern).groups:
        raise ConfigurationError(
            f"`command.step_pattern` {command.step_pattern!r} has no group.",
            expected="a group around the number, e.g. `ckpt_(\\d+)`",
            fix="put brackets around the part that is the step",
        )
    rule, _, value = command.complete.partition(":")
    wrong = {
        "weights": bool(value),
        "file": not value or value.startswith("/") or ".." in value.split("/"),
        "quiet": not _is_seconds(value),
    }
    if wrong.get(rule, True):
        raise ConfigurationError(
            f"`command.complete` is {command.complete!r}.",
            expected="`weights`, `file:NAME` (a name inside the checkpoint) or `quiet:SECONDS`",
            fix="set e.g. command.complete=file:trainer_state.json",
        )
    for name in ("checkpoints", "exports"):
        text = getattr(command, name)
        if not text or text.startswith(("/", "~")) or ".." in text.split("/"):
            raise ConfigurationError(
                f"`command.{name}` is {text!r}.",
                expected="a path below {output}, not an absolute one",
                fix=f"set e.g. command.{name}=" + ("ckpt_*" if name == "checkpoints" else "final"),
            )
    for setting in command.env:
        if not re.match(r"[A-Za-z_]\w*=", setting):
            raise ConfigurationError(
                f"`command.env` holds {setting.partition('=')[0]!r}, which sets nothing.",
                expected="NAME=VALUE each",
                fix="correct command.env",
            )


def _check_placeholders(config: RecipeConfig) -> None:
    command = config.command
    everywhere = ("output", "seed", "data", "model", "workdir")
    allowed = {
        "run": (*everywhere, "resume"),
        "resume_arguments": (*everywhere, "checkpoint"),
        "companions": ("model",),
    }
    texts = [(f"command.{name}", getattr(command, name), known) for name, known in allowed.items()]
    texts += [("command.env", setting, everywhere) for setting in command.env]
    for path, text, known in texts:
        for name in placeholders(text):
            if name not in known:
                raise ConfigurationError(
                    f"`{path}` has the placeholder {{{name}}}.",
                    expected="one of " + ", ".join(f"{{{k}}}" for k in known),
                    fix=f"correct it, or write {{{{{name}}}}} where the braces are meant",
                )
    resumes = "checkpoint" in placeholders(command.resume_arguments)
    if command.resume_arguments and not ("resume" in placeholders(command.run) and resumes):
        raise ConfigurationError(
            "`command.resume_arguments` would never reach the trainer.",
            expected="{resume} in command.run, and {checkpoint} in command.resume_arguments",
            fix="set e.g. command.run='python train.py {resume}' and "
            "command.resume_arguments='--resume_from {checkpoint}'",
        )


def _check_pattern(path: str, text: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigurationError(
            f"`{path}` {text!r} is no regular expression: {error}.",
            expected="a Python regular expression",
            fix=f"correct {path}",
        ) from error


def _is_seconds(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and float(text) > 0
    except ValueError:
        return False


_ADDRESS = re.compile(r"(?i)\bhttps?://")


def check_notify(config: RecipeConfig) -> None:
    """Refuse a `notify` section that cannot work, or that would put an address into records. What
    is wrong with it is not repeated: it may be a secret."""
    notify = config.notify
    for field, names in (("urls", notify.urls), ("webhook", (notify.webhook or "URL",))):
        if not all(map(is_place, names)):
            raise ConfigurationError(
                f"`notify.{field}` has an address in it, or something else that is no name of a "
                "variable.",
                expected="the name of the environment variable, or the path (from / or ~/) of the "
                "file, that holds the address: it is often a secret, and would stand in every "
                "record of the run",
                fix="export MY_HOOK=…, and set notify.urls=[MY_HOOK]",
            )
    if notify.command is not None and not notify.command.strip():
        raise ConfigurationError(
            "`notify.command` is empty.",
            expected="a shell command, which gets the message as JSON on its standard input",
            fix="set e.g. notify.command='cat >> ~/told.jsonl', or notify.command=null for none",
        )
    if notify.command is not None and _ADDRESS.search(notify.command):
        raise ConfigurationError(
            "`notify.command` has an address in it.",
            expected="no address: the command stands in every record of the run, and whoever reads "
            "such an address can often post to it",
            fix='export MY_WEBHOOK=…, and write "$MY_WEBHOOK" in the command, in single quotes',
        )
    for name in ("after_min", "pause_min"):
        value = getattr(notify, name)
        if value < 0:
            raise ConfigurationError(
                f"`notify.{name}` is {value}.",
                expected="minutes, zero or more",
                fix=f"set notify.{name}=… to such a value",
            )


class Check(NamedTuple):
    """``holds(config)`` or else a refusal made of ``what``, ``expected``, ``fix``."""

    holds: Callable[[RecipeConfig], bool]
    what: Callable[[RecipeConfig], str]
    expected: str
    fix: str


#: Fields of a request to a judge that have a field of their own, or are none of the user's.
_OWN_OF_BODY = frozenset(
    ("max_completion_tokens", "max_tokens", "messages", "model", "stream", "temperature")
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

CHECKS: tuple[Check, ...] = (
    Check(
        lambda c: c.data.validation_fraction < 1.0,
        lambda c: f"`data.validation_fraction` is {c.data.validation_fraction}.",
        "a share below 1: something must be left to train on",
        "set e.g. data.validation_fraction=0.05",
    ),
    Check(
        lambda c: 0.0 < c.data.held_out_fraction < 1.0,
        lambda c: f"`data.held_out_fraction` is {c.data.held_out_fraction}.",
        "a share of questions strictly between 0 and 1",
        "set e.g. data.held_out_fraction=0.1",
    ),
    Check(
        lambda c: (
            not (c.reward.instance_rubrics_only and c.reward.rubric_source in ("static", "none"))
        ),
        lambda c: (
            "`reward.instance_rubrics_only` is true but `reward.rubric_source` is "
            f"{c.reward.rubric_source}: no rubric would be left."
        ),
        "rubric_source `instance` or `instance+static`",
        "change one of the two",
    ),
    Check(
        lambda c: (
            not asks_judge(c)
            or c.judge.kind != "openai"
            or bool(c.judge.base_url or c.judge.base_urls or serves(c.judge))
        ),
        lambda c: "`judge.kind` is openai, but neither an address nor a server to start is given.",
        "judge.base_url (a running server), or judge.serve.engine (one that refiner starts)",
        "set judge.base_url=http://127.0.0.1:8000/v1",
    ),
    Check(
        lambda c: c.judge.kind == "lexical" or c.judge.model not in LEXICAL_MODELS,
        lambda c: f"`judge.kind` is openai, but `judge.model` is still {c.judge.model!r}.",
        "the name by which the server knows its model",
        "set judge.model=NAME",
    ),
    Check(
        lambda c: c.judge.kind != "lexical" or c.judge.model in LEXICAL_MODELS,
        lambda c: (
            f"`judge.model` is {c.judge.model!r}, but `judge.kind` is lexical: word overlap would "
            "be recorded under the name of a model."
        ),
        f"{' or '.join(LEXICAL_MODELS)} for the lexical judge, or a judge that is a model",
        "set judge.kind=openai and judge.base_url=http://127.0.0.1:8000/v1, or "
        f"judge.model={LEXICAL_MODELS[0]}",
    ),
    Check(
        lambda c: c.judge.serve.engine != "command" or bool(c.judge.serve_command),
        lambda c: "`judge.serve.engine` is command, but `judge.serve_command` is empty.",
        "the command that serves the judge",
        "set e.g. judge.serve_command='vllm serve {model} --host {host} --port {port}'",
    ),
    Check(
        lambda c: _VARIABLE.fullmatch(c.judge.api_key_env) is not None,
        lambda c: "`judge.api_key_env` is no name of an environment variable.",
        "a name such as REFINER_JUDGE_API_KEY, never the key itself, because fields are recorded",
        "put the key into the environment: export REFINER_JUDGE_API_KEY=…",
    ),
    Check(
        lambda c: _is_extra_body(c.judge.extra_body),
        lambda c: f"`judge.extra_body` is {c.judge.extra_body!r:.80}.",
        f"a JSON object, without {', '.join(sorted(_OWN_OF_BODY))}, which refiner sets itself",
        """set e.g. judge.extra_body='{"chat_template_kwargs": {"enable_thinking": false}}'""",
    ),
    Check(
        lambda c: all(_is_web_address(a) for a in (c.judge.base_url, *c.judge.base_urls)),
        lambda c: (
            "`judge.base_url` or one of `judge.base_urls` is no address of a server, or holds a "
            "user, a password or a query."
        ),
        "http:// or https://, a host, and no secret, because addresses are recorded",
        "set e.g. judge.base_url=http://127.0.0.1:8000/v1, and put a key into the environment "
        "variable that judge.api_key_env names",
    ),
    Check(
        lambda c: not (c.data.sft_path is None and "sft" in c.stages and not c.environment.name),
        lambda c: "The recipe has an `sft` stage, but `data.sft_path` is empty.",
        "demonstrations to train on",
        "set data.sft_path=FILE, or drop `sft` from `stages`",
    ),
    Check(
        lambda c: (
            not (
                c.data.rl_path is None
                and any(kind.on_prompts for kind in kinds_of(c.stages))
                and not c.environment.name
            )
        ),
        lambda c: "The recipe trains or evaluates on prompts, but `data.rl_path` is empty.",
        "prompts with rubrics",
        "set data.rl_path=FILE",
    ),
    Check(
        lambda c: not (c.data.all_held_out and set(STAGES) & set(c.stages)),
        lambda c: "`data.all_held_out` is true, but the recipe trains.",
        "prompts to train on",
        "drop data.all_held_out; another set to evaluate on is named in a protocol file's `data`",
    ),
    Check(
        lambda c: _repository(c) is not None,
        lambda c: f"`publish.repo_id` is {c.publish.repo_id!r}.",
        "only the placeholders {recipe}, {seed}, {step} and {fingerprint}",
        "correct publish.repo_id",
    ),
    Check(
        lambda c: all(p not in ("", ".", "..") for p in (_repository(c) or "").split("/")),
        lambda c: f"`publish.repo_id` would be {_repository(c)!r}, outside of the target.",
        "names joined by single slashes, none of them empty, `.` or `..`",
        "set e.g. publish.repo_id=me/my-model, and the folder above it with publish.path=DIR",
    ),
    Check(
        lambda c: c.publish.license in LICENSES,
        lambda c: (
            f"`publish.license` is {c.publish.license!r}, which is no licence of the Hub's "
            f"list.{suggest(c.publish.license.lower().replace(' ', '-'), LICENSES)}"
        ),
        "an identifier as apache-2.0, mit, cc-by-4.0, llama3.1, or `other`",
        "set publish.license=other for a licence of another name, and tell it by a card of your "
        "own (publish.card_template)",
    ),
    Check(
        lambda c: (
            c.publish.per_step != "repository"
            or c.publish.which in ("final", "best")
            or "{step}" in c.publish.repo_id
        ),
        lambda c: f"publish.per_step=repository, but `publish.repo_id` is {c.publish.repo_id!r}.",
        "a repository for each step",
        "write {step} into publish.repo_id, or set publish.per_step=tag",
    ),
    *(
        Check(
            lambda c, name=name: (  # type: ignore[misc]
                "evaluate" not in c.stages
                or 0 < len(getattr(c.evaluate, name)) == len(set(getattr(c.evaluate, name)))
            ),
            lambda c, name=name: f"`evaluate.{name}` is {list(getattr(c.evaluate, name))}.",  # type: ignore[misc]
            "at least one, and each at most once",
            f"correct evaluate.{name}, or drop `evaluate` from `stages`",
        )
        for name in ("models", "decoding")
    ),
)


def _is_extra_body(text: str) -> bool:
    if not text.strip():
        return True
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and not _OWN_OF_BODY & value.keys()


def _is_web_address(text: str | None) -> bool:
    if text is None:
        return True
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port  # each raises for what it cannot be
    except ValueError:
        return False
    plain = not ("@" in parts.netloc or parts.query or parts.fragment)
    return parts.scheme in ("http", "https") and bool(host) and plain


def _repository(config: RecipeConfig) -> str | None:
    """``publish.repo_id`` with an example's values filled in; None if that cannot be done."""
    try:
        return config.publish.repo_id.format(
            recipe=config.recipe, seed=config.seed, step=1, fingerprint="0" * 8
        )
    except (ValueError, LookupError, AttributeError):
        return None


_FIELDS = dict(walk(RecipeConfig))
_FLOATS = attrgetter(*_FIELDS)
_LIMITED = {path: info.range for path, info in _FIELDS.items() if info.range.words}
_NUMBERS = attrgetter(*_LIMITED)


def _check_ranges(config: RecipeConfig) -> None:
    """Every number is one, and lies in the range that its declaration says."""
    for path, value in zip(_FIELDS, _FLOATS(config), strict=True):
        if isinstance(value, float) and not math.isfinite(value):
            raise _number(path, value, "a finite number")
    for (path, limits), value in zip(_LIMITED.items(), _NUMBERS(config), strict=True):
        # None, where a field allows it, is "no limit" and not a number.
        if value is not None and not limits.holds(value):
            raise _number(path, value, limits.words)


def check_config(config: RecipeConfig) -> RecipeConfig:
    """``config`` itself, or the first refusal.

    Raises
    ------
    ConfigurationError
        A value or a combination of values is impossible, or is a secret.
    """
    check_secrets(config)  # before the others, whose refusals repeat values
    _check_ranges(config)
    for check in CHECKS:
        if not check.holds(config):
            raise ConfigurationError(check.what(config), expected=check.expected, fix=check.fix)
    check_environment(config)
    check_command(config)
    check_training(config)
    check_sampling(config)
    check_notify(config)
    for name, measured in configs_under(config).items():
        with refused_under(name):
            _check_measuring(
                measured.data,
                measured.reward,
                measured.judge,
                measured.evaluate,
                measured.grpo.response_length,
                measured.environment,
            )
    return config


@functools.lru_cache(maxsize=64)
def _check_measuring(
    data: DataConfig,
    reward: RewardConfig,
    judge: JudgeConfig,
    evaluate: EvaluateConfig,
    response_length: int,
    environment: EnvironmentConfig,
) -> None:
    """Check what a protocol may fix, of a recipe of its kind; thousands of trials have it in
    common."""
    plain = RecipeConfig(stages=("data", "evaluate"), environment=environment)
    grpo = replace(plain.grpo, response_length=response_length)
    check_config(
        replace(plain, data=data, reward=reward, judge=judge, evaluate=evaluate, grpo=grpo)
    )


def _number(path: str, value: Any, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"`{path}` is {value}.", expected=expected, fix=f"set {path}=… to such a value"
    )
