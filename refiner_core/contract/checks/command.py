"""Checks of a `command` section: what can never run is refused when the plan is made."""

from __future__ import annotations

import math
import re

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.plan import placeholders


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
