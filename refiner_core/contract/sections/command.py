"""Section `command`: another trainer's script, and the placeholders of its texts."""

from __future__ import annotations

import re
from typing import Literal

from pydantic.dataclasses import dataclass

from refiner_core.contract.marks import STRICT, execution, identity, section
from refiner_core.contract.sections.steering import Resources

#: Doubled braces, the shell's own ``${…}``, or a placeholder.
PLACEHOLDER = re.compile(r"\{\{|\}\}|\$\{[^}]*\}|\{(?P<name>[A-Za-z_]+)\}")


@dataclass(frozen=True, config=STRICT)
class CommandConfig:
    """Another trainer's script, run under the same care (stage `command`).

    ``run``, ``resume_arguments`` and the values of ``env`` may use these placeholders, quoted
    for the shell (unquoted in ``env``). ``{{`` and ``}}`` stand for single braces.

    ``{output}``
        its output folder; the same one in all attempts.
    ``{seed}``, ``{workdir}``
        run seed; its working directory.
    ``{data}``
        output folder of the `data` stage.
    ``{model}``
        folder of the model that it starts from: the recipe's newest one, else the base model.
    ``{resume}``
        ``resume_arguments``; empty until there is a complete checkpoint.
    ``{checkpoint}``
        the newest complete checkpoint (in ``resume_arguments`` only).
    """

    run: str = identity("", doc="the shell command that trains")
    version: str = identity("", doc="a name for the script's state, when its text is not in `run`")
    adopted: str = identity(
        "", doc="digest of the weights adopted by `refiner adopt`, instead of `run`"
    )
    env: tuple[str, ...] = identity(
        (), doc="its environment variables, `NAME=VALUE` each; no secrets"
    )
    workdir: str | None = execution(None, doc="its working directory; default: that of `refiner`")
    resume_arguments: str = execution(
        "", doc="value of `{resume}` from the second start on, e.g. `--resume {checkpoint}`"
    )
    checkpoints: str = execution(
        "checkpoint-*", doc="pattern of its checkpoint folders or files, below `{output}`"
    )
    step_pattern: str = execution(
        r"(\d+)(?!.*\d)", doc="regular expression whose group is the step in a checkpoint's name"
    )
    complete: str = execution(
        "weights",
        doc="when a checkpoint counts: `weights` (readable shards, and the files of its "
        "siblings), `file:NAME` (that file exists), or `quiet:SECONDS` (unchanged for so "
        "long)",
    )
    keep: int = execution(2, ge=1, doc="complete checkpoints kept when space is short, at least 1")
    heartbeat: Literal["output", "files"] = execution(
        "output", doc="sign of life: printed output, or a write below `{output}`"
    )
    progress_pattern: str = execution(
        r"[Ss]tep[ :=]+(?P<step>\d+)(?:\s*/\s*(?P<total>\d+))?",
        doc="regular expression on printed lines: groups `step`, `total`, and any metric by name",
    )
    exports: str = identity(
        "auto", doc="folder of the final weights below `{output}`; `auto` is the newest checkpoint"
    )
    companions: str = identity(
        "",
        doc="folder with the config and tokenizer that exports lack; `{model}` is the model that "
        "training starts from",
    )
    stop_signal: Literal["TERM", "INT", "USR1", "USR2"] = execution(
        "TERM", doc="signal that asks it to save and end"
    )
    needs_network: bool = execution(False, doc="whether it needs the internet")
    resources: Resources = section(Resources, doc="resources of its job")


def uses(command: CommandConfig, placeholder: str) -> bool:
    """Tell whether a command's texts name ``{placeholder}``."""
    texts = (command.run, command.resume_arguments, command.companions, *command.env)
    return any(placeholder in placeholders(text) for text in texts)


def placeholders(text: str) -> list[str]:
    """The names in single braces, in order, without ``{{x}}`` and the shell's ``${x}``."""
    return [m.group("name") for m in PLACEHOLDER.finditer(text) if m.group("name")]
