"""Evidence of a sweep: its records as values, and the grouping of comparable evaluations.

In: nothing; ``flows.reporting`` fills :class:`SweepEvidence` from a workspace, tests from a
generator. Out: a :class:`Group` for each model, decoding and way of measuring, with each trial's
evaluation.

An evaluation shared by several trials is stored once. Texts (answers, prompts, judgements) are
not in memory: ``SweepEvidence.stored`` reads the few that a report shows. A way of measuring is a
protocol without its prompts: evaluations that differ only in prompts are in one group, so that the
report can call them *not comparable*, with the reason. All other differences (judge, rubrics,
sampling) separate groups, as do, for the metric ``reward``, different combinations of the reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from refiner_core.contract.fingerprint import digest
from refiner_core.contract.records import SweepRecord
from refiner_core.evaluation.metric_names import domain_of, of_domain
from refiner_core.evaluation.metrics import in_order, of_tasks, weighed
from refiner_core.report.sweep.sweep_report import Row

Floats = npt.NDArray[np.float64]


class PromptMeans(NamedTuple):
    """Metrics per prompt, the mean over its samples.

    ``values`` is [metrics, prompts], NaN if no sample of a prompt has the metric; ``prompts``
    are sample ids in ascending order.
    """

    prompts: tuple[str, ...]
    metrics: tuple[str, ...]
    values: Floats

    def of(self, metric: str) -> Floats | None:
        """One metric [prompts]; None if it was not measured."""
        if metric not in self.metrics:
            return None
        row: Floats = self.values[self.metrics.index(metric)]
        return row

    def about(self, metric: str) -> tuple[tuple[str, ...], Floats | None]:
        """The prompts of a metric, and its values there: for a metric by domain
        (``pass@4/retail``) the tasks of that domain, else all."""
        row = self.of(metric)
        if not domain_of(metric):
            return self.prompts, row
        kept = of_domain(metric, self.prompts)
        prompts = tuple(prompt for prompt, about in zip(self.prompts, kept, strict=True) if about)
        return prompts, None if row is None else row[np.array(kept, dtype=bool)]


@dataclass(frozen=True)
class MeasuredDecoding:
    """One decoding of a finished evaluate stage.

    Attributes
    ----------
    stage, model
        Id of the stage, and its evaluated model.
    protocol_file
        Its protocol file, empty for the recipe's own protocol.
    protocol, reward_protocol
        Fingerprints: of all metrics except ``reward``, and of ``reward``.
    means
        The model's answers.
    reference
        The random copier's answers (for agents, the attempts of the do-nothing agent), the
        same in all evaluations of a protocol; None if the evaluation has none.
    samples
        Path of its samples.
    episodes
        For agents, the counts of attempts in ``results.json``
        (:mod:`refiner_core.evaluation.episodes`).
    """

    stage: str
    model: str
    protocol_file: str
    decoding: str
    protocol: str
    reward_protocol: str
    means: PromptMeans
    reference: PromptMeans | None
    samples: Path
    episodes: Mapping[str, Any] = field(default_factory=dict)


#: Log of a training stage: metric -> (steps, values), steps ascending.
Training = Mapping[str, tuple[npt.NDArray[np.int64], Floats]]


@dataclass(frozen=True)
class TrialEvidence:
    """One trial: its state, and the ids of its finished evaluations and (by name) training
    stages.

    ``missing`` names evaluations that are planned but not done; ``monitor`` is the report of its
    monitor, empty without one.
    """

    row: Row
    stages: Mapping[str, str]
    evaluations: tuple[str, ...] = ()
    trainings: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    monitor: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, int]:
        """Arm and seed."""
        return self.row["arm"], self.row["seed"]


@dataclass(frozen=True)
class SweepEvidence:
    """Everything that a sweep's report is made of.

    Attributes
    ----------
    trials
        In the order of the sweep.
    evaluations, trainings
        By stage id; for an evaluation its measurements, by decoding.
    protocols
        Fingerprint -> its description, as in ``results.json``.
    people
        Means corrected by people's labels, with ``arm`` and ``seed``.
    stored
        Reader of large data: ``answers(measured, prompts)`` (rows of first
        samples, for agents of the first few attempts), ``rubrics(measured, names)``
        (:class:`RubricScores`, or None if nothing was judged by rubrics) and
        ``questions(stage, prompts)`` (those that can be found). None if nothing can be read any
        more: the report then has no texts and no rubrics.
    """

    sweep: SweepRecord
    made_at: str
    state: Literal["running", "finished", "stopped"]
    trials: tuple[TrialEvidence, ...]
    evaluations: Mapping[str, Sequence[MeasuredDecoding]]
    protocols: Mapping[str, Mapping[str, Any]]
    trainings: Mapping[str, Training] = field(default_factory=dict)
    people: tuple[Row, ...] = ()
    incidents: tuple[Row, ...] = ()
    stored: Any = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


_PROMPTS = ("data", "prompts", "num_prompts")
#: Names of protocol files do not affect the way of measuring.
_LEFT_OUT = (*_PROMPTS, "file")


#: Trial -> name of a protocol file (empty: the recipe's own protocol) -> its evaluation.
_Cells = dict[tuple[str, int], dict[str, MeasuredDecoding]]


@dataclass(frozen=True)
class Group:
    """Evaluations of one model, measured in one way.

    Attributes
    ----------
    protocol
        Fingerprint of the baseline's evaluations, or of the first if the baseline has none.
    name, judge
        Readable: the protocol file or the recipe's own protocol; judge, its prompts and the
        rubrics.
    reward
        Whether this group is for the metric ``reward`` only (for agents, also ``partial``).
    cells
        By arm and seed.
    """

    model: str
    decoding: str
    protocol: str
    name: str
    judge: str
    reward: bool
    cells: Mapping[tuple[str, int], MeasuredDecoding]

    @cached_property
    def arms(self) -> tuple[str, ...]:
        """Arms measured in this way."""
        return tuple(dict.fromkeys(arm for arm, _ in self.cells))

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Measured metrics, in the order of reports."""
        found = (m for cell in self.cells.values() for m in cell.means.metrics)
        return tuple(m for m in in_order(found) if weighed(m) == self.reward)

    @cached_property
    def agents(self) -> bool:
        """True if these are attempts of agents, not answers."""
        first = next(iter(self.cells.values()))
        return any(of_tasks(m) for m in first.means.metrics)

    @cached_property
    def protocol_files(self) -> frozenset[str]:
        """Names of its protocol files; ``""`` is the recipe's own protocol."""
        return frozenset(cell.protocol_file for cell in self.cells.values())

    def fingerprint(self, cell: MeasuredDecoding) -> str:
        """Fingerprint of one of its cells."""
        return cell.reward_protocol if self.reward else cell.protocol

    def seeds_of(self, arm: str) -> tuple[int, ...]:
        """Seeds of an arm's measurements, ascending."""
        return self._seeds.get(arm, ())

    @cached_property
    def _seeds(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for arm, seed in self.cells:
            found.setdefault(arm, []).append(seed)
        return {arm: tuple(sorted(seeds)) for arm, seeds in found.items()}


def make_groups(evidence: SweepEvidence) -> list[Group]:
    """All groups in which arms can differ, in the order of trials.

    A model shared by all arms (the base model, one SFT for all) is no outcome of the sweep: groups
    in which every seed has one evaluation for all arms are left out.
    """
    families = {fp: _family(protocol) for fp, protocol in evidence.protocols.items()}
    found: dict[tuple[str, str, str, bool], _Cells] = {}
    for trial in evidence.trials:
        for stage in trial.evaluations:
            for measured in evidence.evaluations[stage]:
                for reward in (False, True):
                    protocol = measured.reward_protocol if reward else measured.protocol
                    family = families.get(protocol, protocol)
                    key = (measured.model, measured.decoding, family, reward)
                    cells = found.setdefault(key, {}).setdefault(trial.place, {})
                    cells.setdefault(measured.protocol_file, measured)
    groups = [
        _group(evidence, key, cells)
        for key, places in found.items()
        for cells in _apart(evidence, places)
        if not _shared(evidence, cells)
    ]
    return [group for group in groups if group.metrics]


def _apart(
    evidence: SweepEvidence, places: _Cells
) -> list[dict[tuple[str, int], MeasuredDecoding]]:
    """Equal evaluations made several times in one trial (for example under the recipe's own
    protocol and under a file that differs only in prompts), each in a separate group. A trial
    without the baseline's kind of evaluation is placed beside the baseline's."""
    if all(len(cells) == 1 for cells in places.values()):
        return [{place: next(iter(cells.values())) for place, cells in places.items()}]
    files = dict.fromkeys(file for cells in places.values() for file in cells)
    base = {
        f for (arm, _), cells in places.items() for f in cells if arm == evidence.sweep.baseline
    }
    apart = []
    for file in files:
        chosen = {}
        for place, cells in places.items():
            if file in cells:
                chosen[place] = cells[file]
            elif file in base and not base & cells.keys():
                chosen[place] = next(iter(cells.values()))
        apart.append(chosen)
    return apart


def _shared(evidence: SweepEvidence, cells: Mapping[tuple[str, int], MeasuredDecoding]) -> bool:
    """True if all arms have the same evaluations."""
    by_seed: dict[int, set[str]] = {}
    for (_, seed), cell in cells.items():
        by_seed.setdefault(seed, set()).add(cell.stage)
    several = len(evidence.sweep.arms) > 1 and len({arm for arm, _ in cells}) > 1
    return several and all(len(stages) == 1 for stages in by_seed.values())


def _group(
    evidence: SweepEvidence,
    key: tuple[str, str, str, bool],
    cells: dict[tuple[str, int], MeasuredDecoding],
) -> Group:
    model, decoding, _, reward = key
    baseline = evidence.sweep.baseline
    first = next((c for (arm, _), c in cells.items() if arm == baseline), None)
    first = first or next(iter(cells.values()))
    fingerprint = first.reward_protocol if reward else first.protocol
    files = (c.protocol_file for c in cells.values())
    return Group(
        model=model,
        decoding=decoding,
        protocol=fingerprint,
        name=next(filter(None, files), "") or "own",
        judge=judge_text(evidence.protocols.get(fingerprint, {})),
        reward=reward,
        cells=cells,
    )


def judge_text(protocol: Mapping[str, Any]) -> str:
    """``qwen3-32b@v1, instance+static v3``; for agents, environment and user."""
    if environment := protocol.get("environment"):
        return environment_text(environment)
    return ", ".join(filter(None, judge_and_rubrics(protocol)))


def judge_and_rubrics(protocol: Mapping[str, Any]) -> tuple[str, str]:
    """``qwen3-32b@v1`` and ``instance+static v3``; empty if there are none."""
    judge, rubrics = protocol.get("judge") or {}, protocol.get("rubrics") or {}
    who = "@".join(str(judge[k]) for k in ("model", "prompt") if judge.get(k))
    return who, " ".join(str(rubrics[k]) for k in ("source", "static") if rubrics.get(k))


def environment_text(environment: Mapping[str, Any]) -> str:
    """``desk 1, user: scripted``."""
    user = environment.get("user") or ""
    if isinstance(user, Mapping):
        parts = (f"{k} {v}" if k != "model" else str(v) for k, v in user.items() if v is not None)
        user = ", ".join(parts)
    where = f"{environment.get('name')} {environment.get('version')}"
    return f"{where}, user: {user}" if user else where


def _family(protocol: Mapping[str, Any]) -> str:
    return digest({k: v for k, v in protocol.items() if k not in _LEFT_OUT})
