"""Section `monitor`: a second opinion on the policy while its reward trains it."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from refiner_core.contract.marks import STRICT, added

#: Share of the judged answers that the monitor adds by default: less than 5 % of the calls, if gold
#: asks up to half more questions than the training reward.
SHARE = 0.04


@dataclass(frozen=True, config=STRICT)
class MonitorConfig:
    """Gold reward on fixed prompts during GRPO, and a sequential test against the training reward.

    Training is the same with and without it, unless it stops the run: with `action: stop` its
    fields are part of the stage's identity, otherwise none is.
    """

    every: int = added(0, ge=0, doc="steps between two looks; 0 is off")
    gold: tuple[str, ...] = added(
        (), doc="protocol files whose `reward` and `judge` score the same answers; the mean counts"
    )
    rows: int | None = added(
        None, ge=1, doc="held-out prompts that no evaluation reads; default: 4 % more answers"
    )
    alpha: float = added(0.05, gt=0, lt=1, doc="largest probability of a false alarm in a run")
    keep: float = added(0.25, ge=0, le=1, doc="share of the proxy's rise that gold must keep")
    action: Literal["warn", "pause", "stop"] = added(
        "warn", doc="on an alarm: warn; pause until the same command; stop with gold's best weights"
    )
