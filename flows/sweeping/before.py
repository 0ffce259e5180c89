"""What is said of a sweep before it is launched: what it takes, and what it can show.

In: a planned sweep and a workspace. Out: a :class:`Before`: forecast, limits that it would pass,
smallest detectable effect, warnings; as lines for people and as JSON. Reads only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flows.sweeping.evidence import read_evidence
from flows.sweeping.forecasting import forecast_json, forecast_lines, forecast_of, passed_by
from flows.sweeping.history import read_history
from infra.disk.keeper import DiskKeeper
from infra.store.workspace import Workspace
from refiner_core.evaluation.metrics import is_number
from sweeps.fitting import Passed
from sweeps.forecast import SweepForecast, held_out_prompts
from sweeps.history import History
from sweeps.power import Detectable, aim_of, detectable, evaluation_of
from sweeps.values import SweepPlan


@dataclass(frozen=True)
class Before:
    """What is known before the launch."""

    forecast: SweepForecast
    passed: tuple[Passed, ...]
    detectable: Detectable
    free_bytes: int | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why the sweep may not answer its question."""
        return self.detectable.warnings

    def lines(self) -> list[str]:
        """For people: the forecast, then what can be seen, then warnings."""
        lines = forecast_lines(self.forecast, self.passed, free_bytes=self.free_bytes)
        return lines + detectable_lines(self.detectable)

    def json(self) -> dict[str, Any]:
        """``forecast`` and ``detectable``, for ``--json``."""
        return {
            "forecast": {
                **forecast_json(self.forecast, self.passed),
                "free_bytes": self.free_bytes,
            },
            "detectable": detectable_json(self.detectable),
        }


def look_before(plan: SweepPlan, workspace: Workspace) -> Before:
    """Everything that is said before a launch. A missing workspace is an empty one."""
    history = read_history(workspace, plan)
    forecast = forecast_of(plan, workspace, history=history)
    found = detectable_of(plan, workspace, history)
    passed = passed_by(forecast, plan, workspace)
    return Before(forecast, passed, found, _free(plan, workspace))


def detectable_of(
    plan: SweepPlan, workspace: Workspace, history: History | None = None
) -> Detectable:
    """The smallest effect that the sweep can see, by what the workspace knows (``history``, where
    it has been read already)."""
    aim = aim_of(plan)
    stage = evaluation_of(plan, aim.model, aim.protocol)
    prompts = None
    if stage is not None:
        history = read_history(workspace, plan) if history is None else history
        prompts = held_out_prompts(plan.trials[0].plan, stage, history)
    return detectable(plan, prompts, read_evidence(workspace, aim))


def _free(plan: SweepPlan, workspace: Workspace) -> int | None:
    if not plan.trials:
        return None
    room = DiskKeeper(workspace, plan.trials[0].plan.config.disk).room()
    return max(0, room.free_bytes)


# ---------------------------------------------------------------- for people


def detectable_lines(found: Detectable) -> list[str]:
    """The smallest effect, what it rests on, and warnings, a line each."""
    aim = found.aim
    number = f"{aim.metric} ({aim.decoding}) of {aim.model or 'no model'}"
    if aim.protocol:
        number += f" under {aim.protocol}"
    lines = [f"Smallest effect that can be seen on {number}: {_effect_text(found)}"]
    if found.if_seeds_spread and (found.effect or 0.0) <= 1:
        supposed = ", ".join(
            f"{effect:.3f} if they differ by {deviation:g}"
            for deviation, effect in found.if_seeds_spread
        )
        lines.append(f"  that is, if seeds do not matter; {supposed} (standard deviation)")
    if found.effect_range is not None and found.evidence.components is not None:
        low, high = found.effect_range
        lines.append(
            f"  likely between {low:.3f} and {high:.3f}: {found.evidence.components.seeds} seeds "
            "say little of how far seeds differ"
        )
    lines.append(f"  by {found.evidence.text}")
    return lines + [f"Warning: {text}." for text in found.warnings]


def _effect_text(found: Detectable) -> str:
    prompts = "an unknown number of" if found.prompts is None else str(found.prompts)
    seeds = f"{found.seeds} seed{'' if found.seeds == 1 else 's'}"
    design = f"{seeds} x {prompts} prompts, {found.arms} against the baseline"
    if found.effect is None:
        if found.prompts is None:
            return f"unknown before the data are made ({design})"
        return f"unknown ({design})"
    if found.effect > 1 and not is_number(found.aim.metric):
        return f"none: a share cannot change by as much as it would take ({design})"
    return f"{found.effect:.3f} in 80 of 100 such sweeps ({design})"


# ---------------------------------------------------------------- for scripts and records


def detectable_json(found: Detectable) -> dict[str, Any]:
    """All of it; numbers that nobody knows are null."""
    known = found.evidence.components
    return {
        "model": found.aim.model,
        "metric": found.aim.metric,
        "decoding": found.aim.decoding,
        "protocol": found.aim.protocol,
        "effect": found.effect,
        "effect_alone": found.effect_alone,
        "effect_range": None if found.effect_range is None else list(found.effect_range),
        "power": 0.8,
        "alpha": 0.05,
        "if_seeds_spread": [
            {"seed_sd": deviation, "effect": effect} for deviation, effect in found.if_seeds_spread
        ],
        "seeds": found.seeds,
        "prompts": found.prompts,
        "arms": found.arms,
        "basis": found.evidence.basis,
        "basis_text": found.evidence.text,
        "components": None if known is None else known._asdict(),
        "mean": found.evidence.mean,
        "wanted": found.wanted,
        "power_for_wanted": found.power_for_wanted,
        "would_do": None if found.remedy is None else asdict(found.remedy),
        "warnings": list(found.warnings),
    }
