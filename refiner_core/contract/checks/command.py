"""Checks of a `command` section: another trainer's texts, patterns and paths."""

from __future__ import annotations

import functools
import re

from refiner_core.contract.config import RecipeConfig, placeholders
from refiner_core.contract.fields import refuse_fields

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
