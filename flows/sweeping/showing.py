"""What a sweep would do, in words and as JSON; changes nothing.

In: a planned sweep and its workspace, which need not exist. Out: tables of arms and stages, what
is shared, what is there already, what it will take and what it can show
(:mod:`flows.sweeping.before`).
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flows.sweeping.before import Before, look_before
from infra.orchestrator.explain import StageForecast, observe_stages
from infra.store.workspace import Workspace
from refiner_core.contract.records import to_json
from sweeps.definition import load_sweep, shipped_sweeps
from sweeps.values import Arm, SweepPlan

#: Version of the JSON that `sweep --dry-run --json` prints.
OUTPUT_VERSION = 1
#: Arms that are shown one by one; of more, so many and a line that says so.
MOST_ARMS = 40


@dataclass(frozen=True)
class SweepLook:
    """A planned sweep beside what its workspace has: stages by id, and what is said beforehand."""

    plan: SweepPlan
    stages: dict[str, StageForecast]
    before: Before

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of the plan, and of what it can show."""
        return (*self.plan.warnings, *self.before.warnings)

    def counts(self) -> dict[str, int]:
        """Stages of all trials, each for itself and each once; of those what is to be done."""
        actions = Counter(found.action for found in self.stages.values())
        return {
            "planned": sum(len(trial.plan.stages) for trial in self.plan.trials),
            "unique": len(self.stages),
            "to_run": actions["run"],
            "running": actions["reattach"],
            "done": actions["skip"],
        }


def look_at_sweep(plan: SweepPlan, workspace: Workspace | None = None) -> SweepLook:
    """What a launch of the sweep would do now. Writes nothing."""
    workspace = workspace or Workspace.read_only(plan.trials[0].plan.config.workspace)
    stages = observe_stages([trial.plan for trial in plan.trials], workspace)
    return SweepLook(plan, stages, look_before(plan, workspace))


def show_sweep_plan(plan: SweepPlan, look: SweepLook | None = None) -> list[str]:
    """What a sweep would do, as lines: arms, seeds, stages, what it takes and what it can show."""
    look = look or look_at_sweep(plan)
    lines = [*_what_it_is(look), ""]
    lines += _table(_arm_rows(look), ("arm", "seeds", "to do", "changes"))
    if len(plan.arms) > MOST_ARMS:
        lines.append(f"… and {len(plan.arms) - MOST_ARMS} more arms (all of them: --json)")
    header = ("stage", "in trials", "once", "to run", "runs", "done")
    lines += ["", *_table(_stage_rows(look), header), "", *look.before.lines()]
    return lines + [f"Warning: {warning}" for warning in plan.warnings]


def _table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> list[str]:
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table
    ]


def _what_it_is(look: SweepLook) -> list[str]:
    """What the sweep is, a line each."""
    plan, counts = look.plan, look.counts()
    sweep = plan.sweep
    lines = [f"sweep {sweep.name} of {sweep.recipe}: {sweep.question.text}".strip().rstrip(":")]
    lines.append(f"workspace: {plan.trials[0].plan.config.workspace}")
    lines += [f"for every trial: {shlex.join(sweep.overrides)}"] * bool(sweep.overrides)
    lines.append(
        f"{_count(len(plan.arms), 'arm')} x {_count(len(sweep.seeds), 'seed')} = "
        f"{_count(len(plan.trials), 'trial')}; baseline {plan.baseline}"
    )
    saved = counts["planned"] - counts["unique"]
    shared = f", since {saved} are shared" if saved else ""
    lines.append(
        f"{_count(counts['planned'], 'stage')}, {counts['unique']} to make{shared}: "
        f"{counts['to_run']} to run, {counts['running']} running, {counts['done']} done"
    )
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)


def _arm_rows(look: SweepLook) -> list[tuple[str, ...]]:
    plan = look.plan
    left: Counter[str] = Counter()
    for trial in plan.trials:
        actions = (look.stages[stage.id].action for stage in trial.plan.stages)
        left[trial.arm] += any(action != "skip" for action in actions)
    rows: list[tuple[str, ...]] = []
    for arm in plan.arms[:MOST_ARMS]:
        name = f"{arm.name} (baseline)" if arm.name == plan.baseline else arm.name
        todo = "done" if not left[arm.name] else _count(left[arm.name], "trial")
        rows.append((name, str(len(plan.sweep.seeds)), todo, _changes(plan, arm)))
    return rows


def _changes(plan: SweepPlan, arm: Arm) -> str:
    """What an arm sets, as overrides; the recipe as it is says so."""
    found = next(t.overrides for t in plan.trials if t.arm == arm.name)
    own = found[len(plan.sweep.overrides) : -1]  # the last one is the seed
    return shlex.join(own) or "(the recipe as it is)"


def _stage_rows(look: SweepLook) -> list[tuple[str, ...]]:
    """Stages by name: in how many trials, how many of them differ, and how these stand."""
    planned: Counter[str] = Counter()
    once: dict[str, dict[str, str]] = {}
    for trial in look.plan.trials:
        for stage in trial.plan.stages:
            planned[stage.name] += 1
            once.setdefault(stage.name, {})[stage.id] = look.stages[stage.id].action
    rows = []
    for name, stages in once.items():
        actions = Counter(stages.values())
        numbers = (planned[name], len(stages), *(actions[a] for a in ("run", "reattach", "skip")))
        rows.append((name, *map(str, numbers)))
    return rows


def sweep_json(plan: SweepPlan, look: SweepLook | None = None) -> dict[str, Any]:
    """What a sweep would do, for scripts (`refiner sweep FILE --dry-run --json`)."""
    look = look or look_at_sweep(plan)
    sweep = plan.sweep
    return {
        "version": OUTPUT_VERSION,
        "sweep": sweep.name,
        "recipe": sweep.recipe,
        "workspace": plan.trials[0].plan.config.workspace,
        "overrides": list(sweep.overrides),
        "baseline": plan.baseline,
        "question": asdict(sweep.question),
        "seeds": list(sweep.seeds),
        "limits": asdict(sweep.limits),
        "arms": [
            {"name": a.name, "levels": dict(a.levels), "changes": to_json(dict(a.changes))}
            for a in plan.arms
        ],
        "trials": [
            {
                "name": trial.name,
                "arm": trial.arm,
                "seed": trial.seed,
                "overrides": list(trial.overrides),
                "stages": [
                    _stage_json(stage.name, look.stages[stage.id]) for stage in trial.plan.stages
                ],
            }
            for trial in plan.trials
        ],
        "stages": look.counts(),
        **look.before.json(),
        "warnings": list(look.warnings),
    }


def _stage_json(name: str, found: StageForecast) -> dict[str, str]:
    return {
        "stage": found.stage.kind,
        "name": name,
        "id": found.stage.id,
        "fingerprint": found.stage.fingerprint,
        "action": found.action,
        "reason": found.reason,
    }


def shipped_rows() -> list[tuple[str, str, str]]:
    """The sweeps that come with refiner: name, recipe, question."""
    found = ((name, load_sweep(name)) for name in shipped_sweeps())
    return [(name, sweep.recipe, sweep.question.text) for name, sweep in found]
