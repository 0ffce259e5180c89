"""Checks across fields, made when a plan is made: impossible sizes are refused with the numbers.

Nothing here looks at the world; what the machine lacks is found at run time.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from refiner_core.contract.checks.environment import Refusal, check_environment, of_server
from refiner_core.contract.checks.secrets import check_secrets
from refiner_core.contract.checks.training import check_sampling, check_training
from refiner_core.contract.config import (
    LEXICAL_MODELS,
    RecipeConfig,
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

#: Licences that the Hub knows; it refuses a card with another. One that is not on its list is
#: ``other``, and its text stands in the card (``publish.card_template``).
_OF_THE_HUB = (
    "apache-2.0 mit afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear "
    "ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 isc "
    "lgpl lgpl-2.1 lgpl-3.0 lgpl-lr lppl-1.3c ms-pl mpl-2.0 ncsa ofl-1.1 openmdw-1.0 osl-3.0 "
    "postgresql unlicense wtfpl zlib "
    "cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 "
    "cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 "
    "cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 "
    "c-uda cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 odc-by odbl pddl "
    "openrail openrail++ bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 "
    "bigcode-openrail-m apple-ascl apple-amlr deepfloyd-if-license "
    "fair-noncommercial-research-license h-research intel-research gemma grok2-community llama2 "
    "llama3 llama3.1 llama3.2 llama3.3 llama4 unknown other"
)
LICENSES = frozenset(_OF_THE_HUB.split())


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


#: Fields of a request to a judge that have a field of their own, or are none of the user's.
_OWN_OF_BODY = frozenset(
    ("max_completion_tokens", "max_tokens", "messages", "model", "stream", "temperature")
)


def _in_data(c: RecipeConfig) -> Iterator[Refusal]:
    data, trains_here = c.data, set(STAGES) & set(c.stages)
    if data.validation_fraction >= 1:
        yield (
            f"`data.validation_fraction` is {data.validation_fraction}.",
            "a share below 1: something must be left to train on",
            "set e.g. data.validation_fraction=0.05",
        )
    if not 0 < data.held_out_fraction < 1:
        yield (
            f"`data.held_out_fraction` is {data.held_out_fraction}.",
            "a share of questions strictly between 0 and 1",
            "set e.g. data.held_out_fraction=0.1",
        )
    if data.sft_path is None and "sft" in c.stages and not c.environment.name:
        yield (
            "The recipe has an `sft` stage, but `data.sft_path` is empty.",
            "demonstrations to train on",
            "set data.sft_path=FILE, or drop `sft` from `stages`",
        )
    on_prompts = any(kind.on_prompts for kind in kinds_of(c.stages))
    if data.rl_path is None and on_prompts and not c.environment.name:
        yield (
            "The recipe trains or evaluates on prompts, but `data.rl_path` is empty.",
            "prompts with rubrics",
            "set data.rl_path=FILE",
        )
    if data.all_held_out and trains_here:
        yield (
            "`data.all_held_out` is true, but the recipe trains.",
            "prompts to train on",
            "drop data.all_held_out; another set to evaluate on is named in a protocol file's "
            "`data`",
        )


def _in_judge(c: RecipeConfig) -> Iterator[Refusal]:
    judge, source, lexical = c.judge, c.reward.rubric_source, c.judge.model in LEXICAL_MODELS
    addresses = [a for a in (judge.base_url, *judge.base_urls) if a is not None]
    if c.reward.instance_rubrics_only and source in ("static", "none"):
        yield (
            f"`reward.instance_rubrics_only` is true but `reward.rubric_source` is {source}: no "
            "rubric would be left.",
            "rubric_source `instance` or `instance+static`",
            "change one of the two",
        )
    if asks_judge(c) and judge.kind == "openai" and not (any(addresses) or serves(judge)):
        yield (
            "`judge.kind` is openai, but neither an address nor a server to start is given.",
            "judge.base_url (a running server), or judge.serve.engine (one that refiner starts)",
            "set judge.base_url=http://127.0.0.1:8000/v1",
        )
    if judge.kind != "lexical" and lexical:
        yield (
            f"`judge.kind` is openai, but `judge.model` is still {judge.model!r}.",
            "the name by which the server knows its model",
            "set judge.model=NAME",
        )
    if judge.kind == "lexical" and not lexical:
        yield (
            f"`judge.model` is {judge.model!r}, but `judge.kind` is lexical: word overlap would "
            "be recorded under the name of a model.",
            f"{' or '.join(LEXICAL_MODELS)} for the lexical judge, or a judge that is a model",
            "set judge.kind=openai and judge.base_url=http://127.0.0.1:8000/v1, or "
            f"judge.model={LEXICAL_MODELS[0]}",
        )
    if judge.serve.engine == "command" and not judge.serve_command:
        yield (
            "`judge.serve.engine` is command, but `judge.serve_command` is empty.",
            "the command that serves the judge",
            "set e.g. judge.serve_command='vllm serve {model} --host {host} --port {port}'",
        )
    if not _is_extra_body(judge.extra_body):
        yield (
            f"`judge.extra_body` is {judge.extra_body!r:.80}.",
            f"a JSON object, without {', '.join(sorted(_OWN_OF_BODY))}, which refiner sets itself",
            """set e.g. judge.extra_body='{"chat_template_kwargs": {"enable_thinking": false}}'""",
        )
    yield from of_server("judge", judge.api_key_env, addresses)


def _in_publish(c: RecipeConfig) -> Iterator[Refusal]:
    publish, repository = c.publish, _repository(c)
    if repository is None:
        yield (
            f"`publish.repo_id` is {publish.repo_id!r}.",
            "only the placeholders {recipe}, {seed}, {step} and {fingerprint}",
            "correct publish.repo_id",
        )
    if any(part in ("", ".", "..") for part in (repository or "").split("/")):
        yield (
            f"`publish.repo_id` would be {repository!r}, outside of the target.",
            "names joined by single slashes, none of them empty, `.` or `..`",
            "set e.g. publish.repo_id=me/my-model, and the folder above it with publish.path=DIR",
        )
    if publish.license not in LICENSES:
        near = suggest(publish.license.lower().replace(" ", "-"), LICENSES)
        yield (
            f"`publish.license` is {publish.license!r}, which is no licence of the Hub's "
            f"list.{near}",
            "an identifier as apache-2.0, mit, cc-by-4.0, llama3.1, or `other`",
            "set publish.license=other for a licence of another name, and tell it by a card of "
            "your own (publish.card_template)",
        )
    by_step = publish.per_step == "repository" and publish.which not in ("final", "best")
    if by_step and "{step}" not in publish.repo_id:
        yield (
            f"publish.per_step=repository, but `publish.repo_id` is {publish.repo_id!r}.",
            "a repository for each step",
            "write {step} into publish.repo_id, or set publish.per_step=tag",
        )


def _in_evaluate(c: RecipeConfig) -> Iterator[Refusal]:
    for name in ("models", "decoding") if "evaluate" in c.stages else ():
        values = getattr(c.evaluate, name)
        if not 0 < len(values) == len(set(values)):
            yield (
                f"`evaluate.{name}` is {list(values)}.",
                "at least one, and each at most once",
                f"correct evaluate.{name}, or drop `evaluate` from `stages`",
            )


def _is_extra_body(text: str) -> bool:
    if not text.strip():
        return True
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and not _OWN_OF_BODY & value.keys()


def _repository(config: RecipeConfig) -> str | None:
    """``publish.repo_id`` with an example's values filled in; None if that cannot be done."""
    try:
        return config.publish.repo_id.format(
            recipe=config.recipe, seed=config.seed, step=1, fingerprint="0" * 8
        )
    except (ValueError, LookupError, AttributeError):
        return None


_FIELDS = dict(walk(RecipeConfig))
_VALUES = attrgetter(*_FIELDS)


def _out_of_range(config: RecipeConfig) -> Iterator[Refusal]:
    """Numbers that are none, or do not lie in the range that their declaration says."""
    for (path, info), value in zip(_FIELDS.items(), _VALUES(config), strict=True):
        finite = not isinstance(value, float) or math.isfinite(value)
        # None, where a field allows it, is "no limit" and not a number.
        if value is not None and not (finite and info.range.holds(value)):
            expected = info.range.words if finite else "a finite number"
            yield f"`{path}` is {value}.", expected, f"set {path}=… to such a value"


def check_config(config: RecipeConfig) -> RecipeConfig:
    """``config`` itself, or the first refusal.

    Raises
    ------
    ConfigurationError
        A value or a combination of values is impossible, or is a secret.
    """
    check_secrets(config)  # before the others, whose refusals repeat values
    for refusals in (_out_of_range, _in_data, _in_judge, _in_publish, _in_evaluate):
        for what, expected, fix in refusals(config):
            raise ConfigurationError(what, expected=expected, fix=fix)
    check_environment(config)
    check_command(config)
    check_training(config)
    check_sampling(config)
    check_notify(config)
    for name, measured in configs_under(config).items():
        with refused_under(name):  # what a protocol may fix, of a recipe of its kind
            plain = RecipeConfig(stages=("data", "evaluate"), environment=measured.environment)
            parts = {part: getattr(measured, part) for part in ("data", "reward", "judge")}
            grpo = replace(plain.grpo, response_length=measured.grpo.response_length)
            _check_once(replace(plain, evaluate=measured.evaluate, grpo=grpo, **parts))
    return config


#: Thousands of trials measure under one protocol.
_check_once = functools.lru_cache(maxsize=64)(check_config)
