"""Reads from earlier evaluations how much a number spreads: over prompts, over seeds, between both.

In: a workspace and the number that decides a sweep. Out: an :class:`~sweeps.power.Evidence`. The
best that is there counts, in this order: two arms with several seeds in common, two arms with one,
one arm with several seeds; else an assumption. It looks at the newest runs and stops early.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.marks import walk
from refiner_core.contract.protocols import under
from refiner_core.contract.records import RunRecord
from refiner_core.evaluation.power import Components, variance_components
from refiner_core.evaluation.samples import load_samples
from sweeps.power import Aim, Evidence, assumed

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
    """What earlier evaluations of that number say; an assumption where there are none."""
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
    text = evidence.text.replace(
        "no earlier evaluation was found", "earlier ones say nothing of it"
    )
    mean = float(np.mean(groups[0].values))
    return Evidence(evidence.components, evidence.basis, text, mean)


def _rank(evidence: Evidence) -> tuple[int, int]:
    known = evidence.components
    order = ("pairs", "one seed", "seeds of one arm", "assumed", "nothing")
    return order.index(evidence.basis), -(known.seeds * known.prompts if known else 0)


# ---------------------------------------------------------------- reading


def _groups(workspace: Workspace, aim: Aim) -> dict[str, _Group]:
    """Evaluations of the aim's model, by protocol fingerprint, newest first."""
    name = under(f"evaluate-{aim.model}", aim.protocol)
    found: dict[str, _Group] = {}
    seen: set[str] = set()
    for run_id in list(reversed(workspace.run_ids()))[:MOST_RUNS]:
        try:
            run = workspace.read_run(run_id)
            stage_id = run.stages.get(name)
            if stage_id is None or stage_id in seen:
                continue
            seen.add(stage_id)
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
    """What trains the model, but for the seed, as text."""
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
        layouts = [_difference(a, b, seeds, metric) for a, b, seeds in able[:MOST_PAIRS]]
        known = _pooled([variance_components(x) for x in layouts])
        if _nothing_spreads(known):
            continue  # all of it at the floor or the ceiling: no news of a spread
        seeds = len(able[0][2])
        text = (
            f"measured: {len(layouts)} {_plural('pair', len(layouts))} of earlier arms, "
            f"{seeds} {_plural('seed', seeds)}, {known.prompts} prompts"
        )
        if seeds == 1:
            text += "; how much seeds differ is not known"
        return Evidence(known, basis, text, mean)  # type: ignore[arg-type]
    if arms and len(arms[0]) >= 2:
        found = _of_one_arm(arms[0], metric, mean)
        if found.components is not None and not _nothing_spreads(found.components):
            return found
    return None


def _nothing_spreads(known: Components) -> bool:
    return known.prompt + known.residual + (known.seed or 0.0) == 0.0


def _of_one_arm(arm: Mapping[int, Path], metric: str, mean: float) -> Evidence:
    """Two arms that are alike differ as two seeds of one do: each component counts twice, and what
    prompts have in common cancels."""
    seeds = sorted(arm)
    known = variance_components(_layout(arm, seeds, metric))
    doubled = Components(
        None if known.seed is None else 2 * known.seed,
        0.0,
        2 * known.residual,
        known.seeds,
        known.prompts,
    )
    text = (
        f"measured: {len(seeds)} seeds of one earlier arm on {known.prompts} prompts, as if "
        "another arm spread as much"
    )
    return Evidence(doubled, "seeds of one arm", text, mean)


def _difference(
    a: Mapping[int, Path], b: Mapping[int, Path], seeds: Sequence[int], metric: str
) -> Floats:
    return _layout(a, seeds, metric) - _layout(b, seeds, metric)


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
    seeds = [c.seed for c in found if c.seed is not None]
    return Components(
        sum(seeds) / len(seeds) if len(seeds) == len(found) else None,
        sum(c.prompt for c in found) / len(found),
        sum(c.residual for c in found) / len(found),
        max(c.seeds for c in found),
        max(c.prompts for c in found),
    )


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
