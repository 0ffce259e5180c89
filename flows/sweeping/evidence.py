"""Evidence of earlier runs for a sweep: spreads of its number, and what other rewards would change.

In: a workspace and the number that decides a sweep. Out: an :class:`~sweeps.power.Evidence`. The
best that is there counts, in this order: two arms with several seeds in common, two arms with one;
else an assumption. It looks at the newest runs and stops early.

In: a planned sweep and an earlier run. Out: per arm that changes nothing but `reward` and `judge`,
the share of that run's groups whose best answers and advantages would be others. Judgements that
are stored answer as far as they go; a server is never asked: where it would have to be, the calls
are counted and the command that makes them is named.
"""

from __future__ import annotations

import functools
import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flows.running.status import find_run
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.loading import override_text
from refiner_core.contract.marks import walk
from refiner_core.contract.protocols import under
from refiner_core.contract.records import RunRecord, from_json
from refiner_core.evaluation.metrics import load_samples
from refiner_core.evaluation.power import Components, variance_components
from refiner_core.report.printing import counted
from refiner_core.rescoring.document import share
from sweeps.power import Aim, Evidence, assumed
from sweeps.values import SweepPlan

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]
#: Runs that are looked at, evaluations whose samples are read, pairs of arms that are averaged.
MOST_RUNS, MOST_EVALUATIONS, MOST_PAIRS = 200, 40, 4
#: What trains a model: two runs that differ in none of it, but for the seed, are one arm.
_TRAINS = ("model.", "data.", "sft.", "grpo.", "command.", "reward.", "judge.")


@dataclass
class _Group:
    """Evaluations under one protocol: arm -> seed -> file of samples. ``values`` are means."""

    arms: dict[str, dict[int, Path]] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)


def read_evidence(workspace: Workspace, aim: Aim) -> Evidence:
    """Evidence of earlier evaluations of that number; an assumption where there are none."""
    groups = list(_groups(workspace, aim).values())
    best: Evidence | None = None
    for group in groups:
        try:
            found = _of_group(group, aim.metric)
        except RefinerError as error:  # samples that are gone, or too few prompts
            log.debug("%s", error)
            continue
        if found is not None and (best is None or _rank(found) < _rank(best)):
            best = found
    return best or _with_mean(assumed(aim.metric), groups)


def _with_mean(evidence: Evidence, groups: Sequence[_Group]) -> Evidence:
    """One evaluation says nothing of the spread of a difference, but where the metric stands."""
    if not groups:
        return evidence
    found, known = "no earlier evaluation was found", "earlier ones say nothing of it"
    mean = float(np.mean(groups[0].values))
    return replace(evidence, text=evidence.text.replace(found, known), mean=mean)


def _rank(evidence: Evidence) -> tuple[bool, int]:
    known = evidence.components
    return evidence.basis != "pairs", -(known.seeds * known.prompts if known else 0)


# ---------------------------------------------------------------- reading


def _groups(workspace: Workspace, aim: Aim) -> dict[str, _Group]:
    """Evaluations of the aim's model, by protocol fingerprint, newest first."""
    name = under(f"evaluate-{aim.model}", aim.protocol)
    found: dict[str, _Group] = {}
    seen: set[str] = set()
    for run in islice(workspace.runs(newest_first=True), MOST_RUNS):
        stage_id = run.stages.get(name)
        if stage_id is None or stage_id in seen:
            continue
        seen.add(stage_id)
        try:
            result = workspace.read_result(stage_id)
        except RefinerError as error:
            log.debug("%s", error)
            continue
        if result is None:
            continue
        folder = workspace.layout.stage(stage_id).data / result.output_dir
        _note(found, run, result.report, folder, aim)
        if len(seen) >= MOST_EVALUATIONS:
            break
    return found


def _note(
    groups: dict[str, _Group], run: RunRecord, report: Mapping[str, Any], folder: Path, aim: Aim
) -> None:
    for entry in report.get("evaluations") or ():
        if (entry.get("metric"), entry.get("decoding")) != (aim.metric, aim.decoding):
            continue
        group = groups.setdefault(str(entry["protocol"]), _Group())
        arm = group.arms.setdefault(_arm(run.config), {})
        arm.setdefault(int(run.config.get("seed", 0)), folder / str(entry["samples_file"]))
        group.values.append(float(entry["value"]))


def _arm(config: Mapping[str, Any]) -> str:
    """Settings that train the model, but for the seed, as text."""
    values = {}
    for path, info in walk(RecipeConfig):
        if info.mark != "identity" or not path.startswith(_TRAINS):
            continue
        value: Any = config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        values[path] = value
    return json.dumps(values, sort_keys=True, default=str)


# ---------------------------------------------------------------- spreads


def _of_group(group: _Group, metric: str) -> Evidence | None:
    """The best that evaluations under one protocol can say."""
    mean = float(np.mean(group.values))
    arms = sorted(group.arms.values(), key=len, reverse=True)
    pairs = [(a, b, sorted(a.keys() & b.keys())) for a, b in combinations(arms[:6], 2)]
    for least, basis in ((2, "pairs"), (1, "one seed")):
        able = [p for p in pairs if len(p[2]) >= least]
        if not able:
            continue
        able.sort(key=lambda p: -len(p[2]))
        chosen = able[:MOST_PAIRS]
        layouts = [_layout(a, own, metric) - _layout(b, own, metric) for a, b, own in chosen]
        known = _pooled([variance_components(x) for x in layouts])
        if _nothing_spreads(known):
            continue  # all of it at the floor or the ceiling: no news of a spread
        seeds = len(able[0][2])
        text = (
            f"measured: {counted(len(layouts), 'pair')} of earlier arms, "
            f"{counted(seeds, 'seed')}, {known.prompts} prompts"
        )
        if seeds == 1:
            text += "; how much seeds differ is not known"
        return Evidence(known, basis, text, mean)  # type: ignore[arg-type]
    return None


def _nothing_spreads(known: Components) -> bool:
    return known.prompt + known.residual + (known.seed or 0.0) == 0.0


def _layout(arm: Mapping[int, Path], seeds: Sequence[int], metric: str) -> Floats:
    """Means per [seed, prompt] over samples; NaN where none counts. One protocol, so that the
    prompts are the same."""
    tables = [_means(arm[seed], metric) for seed in seeds]
    prompts = sorted(set.union(*(set(t) for t in tables)))
    return np.array([[t.get(p, np.nan) for p in prompts] for t in tables])


def _means(path: Path, metric: str) -> dict[str, float]:
    groups: dict[str, list[float]] = {}
    for row in load_samples(path):
        value = row.get(metric)
        if value is not None:
            groups.setdefault(str(row["sample_id"]), []).append(float(value))
    return {prompt: sum(values) / len(values) for prompt, values in groups.items()}


def _pooled(found: Sequence[Components]) -> Components:
    """Their means; what one of them does not know is not known."""
    seeds, prompts, residuals, *_ = zip(*found, strict=True)
    return Components(
        None if None in seeds else float(np.mean(seeds)),
        float(np.mean(prompts)),
        float(np.mean(residuals)),
        max(c.seeds for c in found),
        max(c.prompts for c in found),
    )


#: Of the run's last steps, and so many groups of them at most: enough for a share.
STEPS, GROUPS = "last:5", 200
_SECTIONS = ("reward.", "judge.")


@dataclass(frozen=True)
class ArmShare:
    """Share of the run's groups that one arm's reward and judge would change.

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

    arm: str = ""
    changes: tuple[str, ...] = ()
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


def rescore_share(plan: SweepPlan, run: str) -> RescoreShare:
    """Which share of a run's groups the arms' rewards and judges would change; asks no judge.

    Parameters
    ----------
    plan
        What :func:`flows.api.make_sweep_plan` has made.
    run
        A run with stored rollouts, in the sweep's workspace.

    Returns
    -------
    RescoreShare
        One share per arm.

    Raises
    ------
    ConfigurationError, DataError
        There is no such run, or it has no stored rollouts.
    """
    workspace = Workspace.read_only(plan.config.workspace)
    wanted = find_run(workspace, run)
    assert wanted is not None, "a run that is named is found or refused"
    then = from_json(RecipeConfig, wanted.config)
    rescored = functools.cache(partial(_share, workspace, wanted))
    first = {trial.arm: trial.plan.config for trial in reversed(plan.trials)}
    found = []
    for arm in plan.arms:
        others = [p for p in arm.changes if not p.startswith(_SECTIONS)]
        changes = _changes(then, first[arm.name])
        shared = ArmShare(changes=changes, note="rewards and judges as the run did")
        if others:
            note = f"changes {', '.join(others)}, too: stored rollouts cannot tell"
            shared = replace(shared, note=note)
        elif changes:
            shared = rescored(changes)
        found.append(replace(shared, arm=arm.name))
    return RescoreShare(wanted.run, tuple(found))


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


def _share(workspace: Workspace, run: RunRecord, changes: tuple[str, ...]) -> ArmShare:
    from flows.rescoring.planning import Options, plan_rescoring
    from flows.rescoring.reading import Part
    from flows.rescoring.results import carry_out

    part = Part(source="rollouts", sample=GROUPS)
    options = Options(overrides=changes)
    planned = plan_rescoring([run.run], workspace.root, options=options, part=part, steps=STEPS)
    of_arm = ArmShare(
        changes=changes,
        groups=len({r.group for p in planned.policies for r in p.rollouts}),
        rollouts=sum(len(p.rollouts) for p in planned.policies),
    )
    if calls := planned.new_calls:
        words = ["refiner", "rescore", run.run, f"workspace={workspace.root}", *changes]
        command = shlex.join([*words, "--steps", STEPS, "--sample", str(GROUPS)])
        note = f"{calls} calls of its judge are needed first"
        return replace(of_arm, calls=calls, command=command, note=note)
    try:
        document, _ = carry_out(planned)
    except RefinerError as error:
        return replace(of_arm, note=error.what)
    name = planned.settings[-1].name
    found = next((c for c in document["comparisons"] if c["setting"] == name), None)
    if found is None:
        return replace(of_arm, note="nothing to compare")
    best, sign = found["best_changed"], found["sign_changed"]
    return replace(of_arm, best_changed=best, sign_changed=sign)


def _arm_text(arm: ArmShare) -> str:
    if arm.note:
        return arm.note
    return (
        f"another best answer in {share(arm.best_changed)} of the groups; advantages of another "
        f"sign in {share(arm.sign_changed)} of the samples"
    )
