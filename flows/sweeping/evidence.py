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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from refiner_core.contract.loading import leaves, override_text
from refiner_core.contract.marks import walk
from refiner_core.contract.protocols import under
from refiner_core.contract.records import RunRecord, from_json
from refiner_core.evaluation.metrics import load_samples
from refiner_core.evaluation.power import Components, variance_components
from refiner_core.report.printing import counted
from refiner_core.rescoring.document import share
from sweeps.power import Evidence, assumed
from sweeps.values import Question, SweepPlan

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


def read_evidence(workspace: Workspace, aim: Question) -> Evidence:
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


def _groups(workspace: Workspace, aim: Question) -> dict[str, _Group]:
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
        for entry in result.report.get("evaluations") or ():
            if (entry.get("metric"), entry.get("decoding")) == (aim.metric, aim.decoding):
                group = found.setdefault(str(entry["protocol"]), _Group())
                arm = group.arms.setdefault(_arm(run.config), {})
                arm.setdefault(int(run.config.get("seed", 0)), folder / str(entry["samples_file"]))
                group.values.append(float(entry["value"]))
        if len(seen) >= MOST_EVALUATIONS:
            break
    return found


def _arm(config: Mapping[str, Any]) -> str:
    """Settings that train the model, but for the seed, as text."""
    values = dict(leaves("", config))
    fields = [p for p, info in walk(RecipeConfig) if info.mark == "identity"]
    return json.dumps({p: values.get(p) for p in fields if p.startswith(_TRAINS)}, default=str)


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
        if known.prompt + known.residual + (known.seed or 0.0) == 0.0:
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


def _layout(arm: Mapping[int, Path], seeds: Sequence[int], metric: str) -> Floats:
    """Means per [seed, prompt] over samples; NaN where none counts. One protocol, so that the
    prompts are the same."""
    import pandas as pd

    tables = []
    for seed in seeds:
        rows = ((str(row["sample_id"]), row.get(metric)) for row in load_samples(arm[seed]))
        table = pd.DataFrame(rows, columns=["prompt", seed]).astype({seed: float}).dropna()
        tables.append(table.groupby("prompt")[seed].mean())
    found: Floats = pd.concat(tables, axis=1).sort_index().to_numpy().T
    return found


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
_SHARES = ("best_changed", "sign_changed")


def rescore_share(plan: SweepPlan, run: str) -> dict[str, Any]:
    """Which share of a run's groups the arms' rewards and judges would change; asks no judge.

    Parameters
    ----------
    plan
        What :func:`flows.api.make_sweep_plan` has made.
    run
        A run with stored rollouts, in the sweep's workspace.

    Returns
    -------
    dict
        ``run``, ``steps``, and ``arms``: of each its ``changes`` of `reward` and `judge` as
        overrides, the shares of groups without a best answer in common (``best_changed``) and of
        advantages with another sign (``sign_changed``), each with its interval, None where it was
        not computed, which ``note`` explains; ``groups`` and ``rollouts`` that were looked at; the
        ``calls`` that a server would have to be asked with first, and the ``command`` that does.

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
    arms = []
    for arm in plan.arms:
        others = [p for p in arm.changes if not p.startswith(_SECTIONS)]
        changes, found = _changes(then, first[arm.name]), _NOT_LOOKED_AT
        if others:
            note = f"changes {', '.join(others)}, too: stored rollouts cannot tell"
            found = {**found, "note": note}
        elif changes:
            found = rescored(changes)
        arms.append({"arm": arm.name, "changes": changes, **found})
    return {"run": wanted.run, "steps": STEPS, "arms": arms}


_NOT_LOOKED_AT: Mapping[str, Any] = {
    **{"best_changed": None, "sign_changed": None, "groups": 0, "rollouts": 0, "calls": 0},
    **{"command": "", "note": "rewards and judges as the run did"},
}


def _changes(then: RecipeConfig, now: RecipeConfig) -> tuple[str, ...]:
    """Identity fields of reward and judge that differ, and where the judge is asked if they do."""
    found: dict[str, list[str]] = {"identity": [], "execution": []}
    for path, info in walk(RecipeConfig):
        value = get_field(now, path) if path.startswith(_SECTIONS) else None
        if path.startswith(_SECTIONS) and value != get_field(then, path):
            found[info.mark].append(override_text(path, value))
    return (*found["identity"], *found["execution"]) if found["identity"] else ()


def _share(workspace: Workspace, run: RunRecord, changes: tuple[str, ...]) -> Mapping[str, Any]:
    from flows.rescoring.planning import Options, plan_rescoring
    from flows.rescoring.reading import Part
    from flows.rescoring.results import carry_out

    part = Part(source="rollouts", sample=GROUPS)
    options = Options(overrides=changes)
    planned = plan_rescoring([run.run], workspace.root, options=options, part=part, steps=STEPS)
    rollouts = [r for p in planned.policies for r in p.rollouts]
    found = {**_NOT_LOOKED_AT, "groups": len({r.group for r in rollouts}), "note": ""}
    found["rollouts"] = len(rollouts)
    if calls := planned.new_calls:
        words = ["refiner", "rescore", run.run, f"workspace={workspace.root}", *changes]
        command = shlex.join([*words, "--steps", STEPS, "--sample", str(GROUPS)])
        note = f"{calls} calls of its judge are needed first"
        return found | {"calls": calls, "command": command, "note": note}
    try:
        document, _ = carry_out(planned)
    except RefinerError as error:
        return found | {"note": error.what}
    name = planned.settings[-1].name
    compared = next((c for c in document["comparisons"] if c["setting"] == name), None)
    if compared is None:
        return found | {"note": "nothing to compare"}
    return found | {key: compared[key] for key in _SHARES}


def share_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What :func:`rescore_share` gave, for people: a line or two for each arm."""
    yield f"By the rollouts of {found['run']} ({STEPS.replace(':', ' ')} steps):"
    for arm in found["arms"]:
        best, sign = (share(arm[name]) for name in _SHARES)
        said = f"another best answer in {best} of the groups; advantages of another sign in {sign} "
        yield f"  {arm['arm']}: {arm['note'] or said + 'of the samples'}"
        if arm["command"]:
            yield f"    {arm['command']}"
