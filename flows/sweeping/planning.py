"""Plan of a sweep with the records of this machine: its work, cost and statistical power.

In: a sweep's name or file, and overrides for every trial. Out: a :class:`~sweeps.values.SweepPlan`.
From it and its workspace, which need not exist: tables of arms and stages, shared and finished
stages, and a :class:`SweepPreview` with forecast, exceeded limits, smallest detectable effect and
warnings, as lines and as JSON. Reads files, writes nothing, needs neither network nor torch. The
recipe is merged once, and shared inputs of trials are hashed once.
"""

from __future__ import annotations

import contextlib
import gc
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from flows.checking.models import asked_of_model, check_model_files
from flows.checking.sources import read_each_once, resolve_sources
from flows.sweeping.evidence import read_evidence
from flows.sweeping.forecasting import (
    forecast_json,
    forecast_lines,
    forecast_of,
    passed_by,
    read_history,
)
from flows.sweeping.status import SweepStatus, SweepWatcher
from infra.disk.manager import DiskManager
from infra.orchestrator.observe import ActionForecast, observe_stages
from infra.store.sweep_records import sweep_names
from infra.store.workspace import Workspace
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import load_recipe, what_follows, whole_paths
from refiner_core.contract.records import ArmRecord, picked, to_json
from refiner_core.evaluation.metrics import is_number
from refiner_core.report.printing import counted, table_lines
from sweeps.checks import varied_fields
from sweeps.definition import load_sweep, shipped_sweeps
from sweeps.forecast import ExceededLimit, SweepForecast, prompts_of
from sweeps.planning import plan_sweep
from sweeps.power import ALPHA, POWER, Detectable, aim_of, detectable
from sweeps.values import SweepFile, SweepPlan


def make_sweep_plan(name_or_path: str, overrides: Sequence[str] = ()) -> SweepPlan:
    """All trials of a sweep (a shipped name, or a YAML file).

    Parameters
    ----------
    name_or_path
        Name or path of the sweep.
    overrides
        ``key=value`` for every trial, applied after the file's: ``workspace=…``, ``dispatch.…``.

    Returns
    -------
    SweepPlan
        Arms and trials, each with its plan.

    Raises
    ------
    ConfigurationError, DataError
        The sweep or its recipe cannot be carried out.
    """
    return plan_of(load_sweep(name_or_path), overrides)


def plan_of(sweep: SweepFile, overrides: Sequence[str] = ()) -> SweepPlan:
    """Like :func:`make_sweep_plan`, for a sweep that was already read."""
    texts = tuple(whole_paths(text, Path.cwd()) for text in overrides)
    # The last override of a field wins.
    last = {text.partition("=")[0]: text for text in (*sweep.overrides, *texts)}
    sweep = replace(sweep, overrides=tuple(last.values()))
    with read_each_once(), _all_stays():
        try:
            base = check_config(load_recipe(sweep.recipe, sweep.overrides))
        except ConfigurationError as error:
            raise error.of(f"The recipe of sweep {sweep.name}") from None
        follow = what_follows(sweep.recipe, sweep.overrides, [*varied_fields(sweep), "seed"])
        plan = plan_sweep(sweep, base, _remembered(resolve_sources), follow)
        for config in {asked_of_model(t.plan.config): t.plan.config for t in plan.trials}.values():
            check_model_files(config)
        return plan


@contextlib.contextmanager
def _all_stays() -> Iterator[None]:
    """Pause Python's garbage collection: nearly all objects stay, and repeated scans take a fifth
    of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _remembered(
    resolve: Callable[[RecipeConfig], Mapping[str, str]],
) -> Callable[[RecipeConfig], Mapping[str, str]]:
    """``resolve``, called once for all configurations with equal inputs."""
    known: dict[object, Mapping[str, str]] = {}

    def sources(config: RecipeConfig) -> Mapping[str, str]:
        # Everything except the training settings, which do not affect the inputs.
        read = (config.model, config.data, config.reward, config.judge)
        key = (*read, config.publish, config.evaluate)
        if key not in known:
            known[key] = resolve(config)
        return known[key]

    return sources


# ---------------------------------------------------------------- for people


def detectable_lines(found: Detectable) -> list[str]:
    """The smallest detectable effect, its basis, and warnings, a line each."""
    aim = found.aim
    number = f"{aim.metric} ({aim.decoding}) of {aim.model or 'no model'}"
    if aim.protocol:
        number += f" under {aim.protocol}"
    lines = [f"Smallest detectable effect on {number}: {_effect_text(found)}"]
    known = found.evidence.components
    if found.effect is not None and known is not None and known.seed is None:
        lines.append("  if seeds do not matter: their spread is unknown")
    if found.effect_range is not None and known is not None:
        low, high = found.effect_range
        lines.append(
            f"  likely between {low:.3f} and {high:.3f}: {known.seeds} seeds say little about "
            "their spread"
        )
    lines.append(f"  by {found.evidence.text}")
    return lines + [f"Warning: {text}." for text in found.warnings]


def _effect_text(found: Detectable) -> str:
    prompts = "an unknown number of" if found.prompts is None else str(found.prompts)
    design = (
        f"{counted(found.seeds, 'seed')} x {prompts} prompts, {found.arms} against the baseline"
    )
    if found.effect is None:
        if found.prompts is None:
            return f"unknown before the data are made ({design})"
        return f"unknown ({design})"
    if found.effect > 1 and not is_number(found.aim.metric):
        return f"none: a share cannot change by so much ({design})"
    return f"{found.effect:.3f} in 80 of 100 such sweeps ({design})"


# ---------------------------------------------------------------- for scripts and records


def detectable_json(found: Detectable) -> dict[str, Any]:
    """All of it as JSON; unknown numbers are null."""
    values, aim = to_json(found), found.aim
    evidence, _ = values.pop("evidence"), values.pop("aim")
    known = found.evidence.components
    return {
        **{**values, **picked(aim, "model", "metric", "decoding", "protocol")},
        "wanted": aim.smallest_effect,
        **{"power": POWER, "alpha": ALPHA},
        **{"basis": evidence["basis"], "basis_text": evidence["text"], "mean": evidence["mean"]},
        "components": None if known is None else known._asdict(),
    }


#: Version of the JSON that `sweep --dry-run --json` prints.
OUTPUT_VERSION = 1
#: Maximum number of arms listed one by one.
MOST_ARMS = 40


@dataclass(frozen=True)
class SweepPreview:
    """A planned sweep with its workspace: stages by id, forecast, exceeded limits, the smallest
    detectable effect, free bytes."""

    plan: SweepPlan
    stages: dict[str, ActionForecast]
    forecast: SweepForecast
    passed: tuple[ExceededLimit, ...]
    detectable: Detectable
    free_bytes: int

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of the plan and of its statistical power."""
        return (*self.plan.warnings, *self.detectable.warnings)

    def lines(self) -> list[str]:
        """For people: the forecast, the detectable effect, then warnings."""
        lines = forecast_lines(self.forecast, self.passed, free_bytes=self.free_bytes)
        return lines + detectable_lines(self.detectable)

    def counts(self) -> dict[str, int]:
        """Counts of the stages of all trials, and of the unique ones; of those by state."""
        actions = Counter(found.action for found in self.stages.values())
        return {
            "planned": sum(len(trial.plan.stages) for trial in self.plan.trials),
            "unique": len(self.stages),
            "to_run": actions["run"],
            "running": actions["reattach"],
            "done": actions["skip"],
        }


def forecast_sweep(plan: SweepPlan) -> SweepPreview:
    """Cost and statistical power of a sweep, given the workspace. Changes nothing.

    Parameters
    ----------
    plan
        From :func:`flows.api.make_sweep_plan`.

    Returns
    -------
    SweepPreview
        Counts, forecast, exceeded limits, the smallest detectable effect.

    Raises
    ------
    WorkspaceError
        A record is damaged.
    """
    workspace = Workspace.read_only(plan.config.workspace)
    stages = observe_stages([trial.plan for trial in plan.trials], workspace)
    history, first = read_history(workspace, plan), plan.trials[0].plan
    forecast = forecast_of(plan, workspace, history=history)
    aim = aim_of(plan)
    stage = first.evaluation(aim.model, aim.protocol)
    prompts = None if stage is None else prompts_of(first, stage, history)
    found = detectable(plan, prompts, read_evidence(workspace, aim))
    free = max(0, DiskManager(workspace, first.config.disk).available().free_bytes)
    return SweepPreview(plan, stages, forecast, passed_by(forecast, plan, workspace), found, free)


def show_sweep_plan(plan: SweepPlan, look: SweepPreview | None = None) -> list[str]:
    """Plan of a sweep as lines: arms, seeds, stages, cost and statistical power."""
    look = look or forecast_sweep(plan)
    lines = [*_what_it_is(look), ""]
    lines += table_lines(_arm_rows(look), ("arm", "seeds", "to do", "changes"))
    if len(plan.arms) > MOST_ARMS:
        lines.append(f"… and {len(plan.arms) - MOST_ARMS} more arms (all of them: --json)")
    return [*lines, "", *look.lines(), *(f"Warning: {warning}" for warning in plan.warnings)]


def _what_it_is(look: SweepPreview) -> list[str]:
    """Lines that describe the sweep."""
    plan, counts = look.plan, look.counts()
    sweep = plan.sweep
    lines = [f"sweep {sweep.name} of {sweep.recipe}: {sweep.question.text}".strip().rstrip(":")]
    lines.append(f"workspace: {plan.config.workspace}")
    lines += [f"for every trial: {shlex.join(sweep.overrides)}"] * bool(sweep.overrides)
    lines.append(
        f"{counted(len(plan.arms), 'arm')} x {counted(len(sweep.seeds), 'seed')} = "
        f"{counted(len(plan.trials), 'trial')}; baseline {plan.baseline}"
    )
    saved = counts["planned"] - counts["unique"]
    shared = f", since {saved} are shared" if saved else ""
    lines.append(
        f"{counted(counts['planned'], 'stage')}, {counts['unique']} to make{shared}: "
        f"{counts['to_run']} to run, {counts['running']} running, {counts['done']} done"
    )
    return lines


def _arm_rows(look: SweepPreview) -> list[tuple[str, ...]]:
    plan = look.plan
    left: Counter[str] = Counter()
    for trial in plan.trials:
        actions = (look.stages[stage.id].action for stage in trial.plan.stages)
        left[trial.arm] += any(action != "skip" for action in actions)
    rows: list[tuple[str, ...]] = []
    for arm in plan.arms[:MOST_ARMS]:
        name = f"{arm.name} (baseline)" if arm.name == plan.baseline else arm.name
        todo = "done" if not left[arm.name] else counted(left[arm.name], "trial")
        rows.append((name, str(len(plan.sweep.seeds)), todo, _changes(plan, arm)))
    return rows


def _changes(plan: SweepPlan, arm: ArmRecord) -> str:
    """Settings of an arm, as overrides, or a note that it has none."""
    found = next(t.overrides for t in plan.trials if t.arm == arm.name)
    own = found[len(plan.sweep.overrides) : -1]  # the last one is the seed
    return shlex.join(own) or "(the recipe as it is)"


def sweep_json(plan: SweepPlan, look: SweepPreview | None = None) -> dict[str, Any]:
    """Plan of a sweep for scripts (`refiner sweep FILE --dry-run --json`)."""
    look = look or forecast_sweep(plan)
    sweep = plan.sweep
    return {
        **{"version": OUTPUT_VERSION, "sweep": sweep.name, "workspace": plan.config.workspace},
        **picked(sweep, "recipe", "overrides", "question", "seeds", "limits"),
        **picked(plan, "baseline", "arms"),
        "trials": [
            {
                **picked(t, "name", "arm", "seed", "overrides"),
                "stages": [_stage_json(s.name, look.stages[s.id]) for s in t.plan.stages],
            }
            for t in plan.trials
        ],
        "stages": look.counts(),
        "forecast": {**forecast_json(look.forecast, look.passed), "free_bytes": look.free_bytes},
        "detectable": detectable_json(look.detectable),
        "warnings": list(look.warnings),
    }


def _stage_json(name: str, found: ActionForecast) -> dict[str, str]:
    return {
        **{"stage": found.stage.kind, "name": name},
        **picked(found.stage, "id", "fingerprint"),
        **picked(found, "action", "reason"),
    }


class ShippedSweep(NamedTuple):
    """A shipped sweep."""

    name: str
    recipe: str
    question: str


@dataclass(frozen=True)
class KnownSweeps:
    """Shipped sweeps, and the state of those of a workspace."""

    shipped: tuple[ShippedSweep, ...]
    recorded: dict[str, SweepStatus] = field(default_factory=dict)


def list_sweeps(workspace: str | Path = RecipeConfig.workspace) -> KnownSweeps:
    """List shipped and recorded sweeps.

    Parameters
    ----------
    workspace
        The folder whose sweeps are listed beside the shipped ones; it need not exist.

    Returns
    -------
    KnownSweeps
        The shipped ones, and those of the workspace by name.

    Raises
    ------
    WorkspaceError
        The folder is no workspace, or a record is damaged.
    """
    ws = Workspace.read_only(workspace)
    recorded = {name: SweepWatcher(ws, name).observe() for name in sweep_names(ws)}
    found = ((name, load_sweep(name)) for name in shipped_sweeps())
    shipped = (ShippedSweep(name, sweep.recipe, sweep.question.text) for name, sweep in found)
    return KnownSweeps(tuple(shipped), recorded)
