"""Evidence from earlier runs for a sweep: the spread of its metric.

In: a workspace and the metric that decides a sweep. Out: an :class:`~sweeps.power.SpreadEvidence`.
The best available counts, in this order: two arms with several seeds in common, two arms with one;
else an assumption. Reads the newest runs and stops early.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flows.sweeping.forecasting import finished_stages
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.loading import leaves
from refiner_core.contract.marks import walk
from refiner_core.contract.protocols import under
from refiner_core.evaluation.metrics import load_samples
from refiner_core.evaluation.power import mean_components, variance_components
from refiner_core.report.printing import counted
from sweeps.power import SpreadEvidence, assumed
from sweeps.values import Question

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]
#: Maximum number of evaluations read, and of pairs of arms averaged.
MOST_EVALUATIONS, MOST_PAIRS = 40, 4
#: Sections that train a model: runs that agree in all of them, except the seed, are one arm.
_TRAINS = ("model.", "data.", "sft.", "grpo.", "command.", "reward.", "judge.")


@dataclass
class _Group:
    """Evaluations under one protocol: arm -> seed -> file of samples. ``values`` are means."""

    arms: dict[str, dict[int, Path]] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)


def read_evidence(workspace: Workspace, aim: Question) -> SpreadEvidence:
    """Evidence from earlier evaluations of that metric; an assumption if there are none."""
    groups = list(_groups(workspace, aim).values())
    found: list[SpreadEvidence] = []
    for group in groups:
        try:
            found += filter(None, [_of_group(group, aim.metric)])
        except RefinerError as error:  # samples are gone, or too few prompts
            log.debug("%s", error)
    if found:
        return min(found, key=_rank)
    evidence = assumed(aim.metric)
    if not groups:
        return evidence
    # One evaluation shows the level of the metric, but not the spread of a difference.
    none, some = "no earlier evaluation was found", "earlier ones do not show it"
    mean = float(np.mean(groups[0].values))
    return replace(evidence, text=evidence.text.replace(none, some), mean=mean)


def _rank(evidence: SpreadEvidence) -> tuple[bool, int]:
    known = evidence.components
    return evidence.basis != "pairs", -(known.seeds * known.prompts if known else 0)


# ---------------------------------------------------------------- reading


def _groups(workspace: Workspace, aim: Question) -> dict[str, _Group]:
    """Evaluations of the aim's model, by protocol fingerprint, newest first."""
    name = under(f"evaluate-{aim.model}", aim.protocol)
    found: dict[str, _Group] = {}
    evaluations = finished_stages(workspace, {"evaluate"})
    asked = ((run, i) for run, i in evaluations if run.stages.get(name) == i)
    for run, stage_id in islice(asked, MOST_EVALUATIONS):
        try:
            result = workspace.read_result(stage_id)
        except RefinerError as error:
            log.debug("%s", error)
            continue
        report = {} if result is None else result.report
        output = workspace.output_dir(stage_id) or Path()
        for entry in report.get("evaluations") or ():
            if (entry.get("metric"), entry.get("decoding")) == (aim.metric, aim.decoding):
                group = found.setdefault(str(entry["protocol"]), _Group())
                arm = group.arms.setdefault(_arm(run.config), {})
                arm.setdefault(int(run.config.get("seed", 0)), output / str(entry["samples_file"]))
                group.values.append(float(entry["value"]))
    return found


def _arm(config: Mapping[str, Any]) -> str:
    """Settings that train the model, except the seed, as text."""
    values = dict(leaves("", config))
    fields = [p for p, info in walk(RecipeConfig) if info.mark == "identity"]
    return json.dumps({p: values.get(p) for p in fields if p.startswith(_TRAINS)}, default=str)


# ---------------------------------------------------------------- spreads


def _of_group(group: _Group, metric: str) -> SpreadEvidence | None:
    """The best evidence from evaluations under one protocol."""
    mean = float(np.mean(group.values))
    arms = sorted(group.arms.values(), key=len, reverse=True)
    pairs = [(a, b, sorted(a.keys() & b.keys())) for a, b in combinations(arms[:6], 2)]
    pairs = sorted((p for p in pairs if p[2]), key=lambda p: -len(p[2]))
    if not pairs:
        return None
    seeds = len(pairs[0][2])
    chosen = [p for p in pairs if len(p[2]) >= min(2, seeds)][:MOST_PAIRS]
    layouts = [_layout(a, own, metric) - _layout(b, own, metric) for a, b, own in chosen]
    known = mean_components([variance_components(x) for x in layouts])
    if known.prompt + known.residual + (known.seed or 0.0) == 0.0:
        return None  # all at the floor or the ceiling: the spread is unknown
    text = (
        f"measured: {counted(len(layouts), 'pair')} of earlier arms, {counted(seeds, 'seed')}, "
        f"{known.prompts} prompts; the spread of seeds is {'hardly' if seeds > 1 else 'not'} known"
    )
    return SpreadEvidence(known, "pairs" if seeds > 1 else "one seed", text, mean)


def _layout(arm: Mapping[int, Path], seeds: Sequence[int], metric: str) -> Floats:
    """Means per [seed, prompt] over samples; NaN where none counts. All under one protocol, so with
    the same prompts."""
    import pandas as pd

    tables = []
    for seed in seeds:
        rows = ((str(row["sample_id"]), row.get(metric)) for row in load_samples(arm[seed]))
        table = pd.DataFrame(rows, columns=["prompt", seed]).astype({seed: float}).dropna()
        tables.append(table.groupby("prompt")[seed].mean())
    found: Floats = pd.concat(tables, axis=1).sort_index().to_numpy().T
    return found
