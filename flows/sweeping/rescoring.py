"""What other rewards or another judge would change, by stored rollouts, before a sweep trains.

In: a planned sweep and an earlier run. Out: per arm that changes nothing but `reward` and `judge`,
the share of that run's groups whose best answers and advantages would be others. Judgements that
are stored answer as far as they go; a server is never asked: where it would have to be, the calls
are counted and the command that makes them is named.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flows.running.status import find_run
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.marks import walk
from refiner_core.contract.overrides import override_text
from refiner_core.contract.records import RunRecord, from_json
from refiner_core.evaluation.statistics import Estimate
from sweeps.values import SweepPlan, Trial

#: Of the run's last steps, and so many groups of them at most: enough for a share.
STEPS, GROUPS = "last:5", 200
_SECTIONS = ("reward.", "judge.")


@dataclass(frozen=True)
class ArmShare:
    """What one arm's reward and judge would change about the run's groups.

    Attributes
    ----------
    changes
        The settings of `reward` and `judge` in which it differs from the run, as overrides.
    best_changed, sign_changed
        Share of groups without a best answer in common, and of advantages with another sign, each
        with its interval and count; None where it was not computed, which ``note`` explains.
    groups, rollouts
        What was looked at.
    calls
        Calls that a server would have to be asked with first.
    command
        The command that asks them.
    """

    arm: str
    changes: tuple[str, ...]
    best_changed: Mapping[str, Any] | None = None
    sign_changed: Mapping[str, Any] | None = None
    groups: int = 0
    rollouts: int = 0
    calls: int = 0
    command: str = ""
    note: str = ""


@dataclass(frozen=True)
class RescoreShare:
    """Every arm against one run."""

    run: str
    arms: tuple[ArmShare, ...]

    def lines(self) -> list[str]:
        """For people, a line or two for each arm."""
        lines = [f"By the rollouts of {self.run} ({STEPS.replace(':', ' ')} steps):"]
        for arm in self.arms:
            lines.append(f"  {arm.arm}: {_arm_text(arm)}")
            if arm.command:
                lines.append(f"    {arm.command}")
        return lines

    def json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"run": self.run, "steps": STEPS, "arms": [asdict(arm) for arm in self.arms]}


def share_of_run(plan: SweepPlan, name: str) -> RescoreShare:
    """The same for a run by its name, in the sweep's workspace.

    Raises
    ------
    ConfigurationError, DataError
        There is no such run, or it has no stored rollouts.
    """
    workspace = Workspace.read_only(plan.trials[0].plan.config.workspace)
    run = find_run(workspace, name)
    assert run is not None, "a run that is named is found or refused"
    return rescore_share(plan, workspace, run)


def rescore_share(plan: SweepPlan, workspace: Workspace, run: RunRecord) -> RescoreShare:
    """What each arm's reward and judge would change about the groups of an earlier run.

    Raises
    ------
    ConfigurationError, DataError
        The run has no stored rollouts.
    """
    then = from_json(RecipeConfig, run.config)
    own = {arm.name: arm.changes for arm in plan.arms}
    first: dict[str, Trial] = {}
    for trial in plan.trials:
        first.setdefault(trial.arm, trial)
    known: dict[tuple[str, ...], ArmShare] = {}
    found = []
    for name, trial in first.items():
        others = [p for p in own.get(name, {}) if not p.startswith(_SECTIONS)]
        changes = _changes(then, trial.plan.config)
        if others:
            note = f"changes {', '.join(others)}, too: stored rollouts cannot tell"
            found.append(ArmShare(name, changes, note=note))
        elif not changes:
            found.append(ArmShare(name, (), note="rewards and judges as the run did"))
        else:
            if changes not in known:
                known[changes] = _share(name, changes, workspace, run)
            found.append(ArmShare(**{**_fields(known[changes]), "arm": name}))
    return RescoreShare(run.run, tuple(found))


def _fields(share: ArmShare) -> dict[str, Any]:
    return {name: getattr(share, name) for name in share.__dataclass_fields__}


def _changes(then: RecipeConfig, now: RecipeConfig) -> tuple[str, ...]:
    """Identity fields of reward and judge that differ, and where the judge is asked if they do."""
    found: list[str] = []
    where: list[str] = []
    for path, info in walk(RecipeConfig):
        if not path.startswith(_SECTIONS):
            continue
        value = get_field(now, path)
        if value != get_field(then, path):
            (found if info.mark == "identity" else where).append(override_text(path, value))
    return (*found, *where) if found else ()


def _share(arm: str, changes: tuple[str, ...], workspace: Workspace, run: RunRecord) -> ArmShare:
    from flows.rescoring import carry_out, plan_rescore
    from flows.rescoring.planning import Wanted
    from flows.rescoring.reading import Part
    from flows.rescoring.settings import Options
    from flows.rescoring.work import Silent

    part = Part(source="rollouts", sample=GROUPS)
    wanted = Wanted(workspace, (run,), Options(overrides=changes), part, steps=STEPS)
    planned = plan_rescore(wanted)
    groups = len({r.group for p in planned.policies for r in p.rollouts})
    rollouts = sum(len(p.rollouts) for p in planned.policies)
    if planned.new_calls:
        words = ["refiner", "rescore", run.run, f"workspace={workspace.root}", *changes]
        command = shlex.join([*words, "--steps", STEPS, "--sample", str(GROUPS)])
        note = f"{planned.new_calls} calls of its judge are needed first"
        return ArmShare(
            arm, changes, None, None, groups, rollouts, planned.new_calls, command, note
        )
    try:
        done = carry_out(planned, Silent())
    except RefinerError as error:
        return ArmShare(arm, changes, None, None, groups, rollouts, note=error.what)
    comparison = next((c.comparison for c in done.compared if c.setting == _name(planned)), None)
    if comparison is None:
        return ArmShare(arm, changes, None, None, groups, rollouts, note="nothing to compare")
    return ArmShare(
        arm,
        changes,
        _json(comparison.best_changed),
        _json(comparison.sign_changed),
        comparison.groups,
        comparison.rollouts,
    )


def _name(planned: Any) -> str:
    return str(planned.settings[-1].name)


def _json(found: Estimate | None) -> dict[str, Any] | None:
    return None if found is None else found._asdict()


def _arm_text(arm: ArmShare) -> str:
    if arm.note:
        return arm.note
    best, sign = arm.best_changed, arm.sign_changed
    parts = []
    if best is not None:
        parts.append(f"another best answer in {_share_text(best)} of the groups")
    if sign is not None:
        parts.append(f"advantages of another sign in {_share_text(sign)} of the samples")
    return f"{'; '.join(parts) or 'nothing to compare'} ({arm.groups} groups)"


def _share_text(found: Mapping[str, Any]) -> str:
    text = f"{100 * found['value']:.0f} %"
    if found["low"] is not None and found["high"] is not None:
        text += f" [{100 * found['low']:.0f}, {100 * found['high']:.0f}]"
    return text
