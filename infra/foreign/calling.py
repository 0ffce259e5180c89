"""From a recipe's `command` section to what is called: the command's text and its environment.

In: :class:`CommandConfig`, and where things lie. Out: a text for ``/bin/sh`` with its placeholders
filled (each quoted), and settings. What we have set for our own worker (our import path, one
thread, no bars) is taken out again: the trainer sees the environment that its user would have.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.process.leftovers import MARK
from refiner_core.contract.config import CommandConfig
from refiner_core.contract.plan import PLACEHOLDER

#: Settings that we make for our own worker.
OURS = (
    *("PYTHONSAFEPATH", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"),
)


@dataclass(frozen=True)
class Call:
    """What a trainer is called with.

    ``data`` and ``model`` are None where the recipe gives none; ``checkpoint`` is None at the first
    start.
    """

    output: Path
    workdir: Path
    seed: int
    stage_id: str
    attempt: int
    data: Path | None = None
    model: str | None = None
    checkpoint: Path | None = None

    def values(self) -> dict[str, str]:
        """Placeholder -> value, without ``resume``; those that have no value are empty."""
        return {
            "output": str(self.output),
            "workdir": str(self.workdir),
            "seed": str(self.seed),
            "data": "" if self.data is None else str(self.data),
            "model": self.model or "",
            "checkpoint": "" if self.checkpoint is None else str(self.checkpoint),
        }


def command_text(config: CommandConfig, call: Call) -> str:
    """The shell command, with every value quoted."""
    values = {name: shlex.quote(value) for name, value in call.values().items()}
    resume = fill(config.resume_arguments, values) if call.checkpoint is not None else ""
    return fill(config.run, {**values, "resume": resume})


def fill(text: str, values: Mapping[str, str]) -> str:
    """``text`` with ``{name}`` replaced; ``{{`` and ``}}`` are single braces, ``${…}`` stays."""

    def replaced(match: object) -> str:
        whole = match.group(0)  # type: ignore[attr-defined]
        name = match.group("name")  # type: ignore[attr-defined]
        if name is None:
            return whole[0] if whole in ("{{", "}}") else str(whole)
        return values.get(name, str(whole))

    return PLACEHOLDER.sub(replaced, text)


def environment(
    config: CommandConfig,
    call: Call,
    ours: Path | None = None,
    base: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The trainer's environment.

    ``ours`` is the folder that this worker imports refiner from, which is no business of the
    trainer's.
    """
    kept = {k: v for k, v in base.items() if k not in OURS and k != "PYTHONPATH"}
    paths = [p for p in base.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(ours)]
    if paths:
        kept["PYTHONPATH"] = os.pathsep.join(paths)
    values = call.values()
    names = ("seed", "data", "model", "checkpoint", "workdir")
    settings = {f"REFINER_{name.upper()}": values[name] for name in names}
    own = (setting.partition("=") for setting in config.env)
    return {
        **kept,
        "PYTHONUNBUFFERED": "1",
        **settings,
        "REFINER_STAGE": call.stage_id,
        "REFINER_ATTEMPT": str(call.attempt),
        **{name: fill(value, values) for name, _, value in own},
        MARK: values["output"],
    }
