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
        "", doc="digest of the weights that `refiner adopt` has taken over, in the place of `run`"
    )
    env: tuple[str, ...] = identity((), doc="settings for it, `NAME=VALUE` each; no secrets")
    workdir: str | None = execution(None, doc="folder it starts in; none is where `refiner` ran")
    resume_arguments: str = execution(
        "", doc="what `{resume}` becomes from the second start on, e.g. `--resume {checkpoint}`"
    )
    checkpoints: str = execution(
        "checkpoint-*", doc="pattern of its checkpoint folders or files, below `{output}`"
    )
    step_pattern: str = execution(
        r"(\d+)(?!.*\d)", doc="regular expression whose group is the step in a checkpoint's name"
    )
    complete: str = execution(
        "weights",
        doc="when a checkpoint counts: `weights` (every shard can be read, and it has what its "
        "siblings have), `file:NAME` (that file is there), or `quiet:SECONDS` (unchanged for so "
        "long)",
    )
    keep: int = execution(2, ge=1, doc="complete checkpoints kept when room is short, at least 1")
    heartbeat: Literal["output", "files"] = execution(
        "output", doc="sign of life: something printed, or something written below `{output}`"
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
        "it starts from",
    )
    stop_signal: Literal["TERM", "INT", "USR1", "USR2"] = execution(
        "TERM", doc="signal that asks it to save and end"
    )
    needs_network: bool = execution(False, doc="whether it must run where the internet is")
    resources: Resources = section(Resources, doc="resources of its job")


def uses(command: CommandConfig, placeholder: str) -> bool:
    """Tell whether a command's texts name ``{placeholder}``."""
    texts = (command.run, command.resume_arguments, command.companions, *command.env)
    return any(placeholder in placeholders(text) for text in texts)


def placeholders(text: str) -> list[str]:
    """The names in single braces, in order, without ``{{x}}`` and the shell's ``${x}``."""
    return [m.group("name") for m in PLACEHOLDER.finditer(text) if m.group("name")]
