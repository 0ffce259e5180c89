"""Which evaluations may stand in one table.

In: :class:`~refiner_core.report.sweep.evidence.Evidence`. Out: a :class:`Group` for each model,
decoding and way of measuring, with the evaluation of each trial in it.

A way of measuring is a protocol without its prompts: evaluations that differ in prompts alone stand
in one group, so that the report can say that they are *not comparable*, and why. All other
differences (judge, rubrics, sampling) make groups of their own. So does, for the metric ``reward``,
how the reward is combined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from refiner_core.contract.fingerprint import digest
from refiner_core.evaluation.metrics import in_order, of_tasks, weighed
from refiner_core.report.sweep.evidence import Evaluation, Evidence, Measured

_PROMPTS = ("data", "prompts", "num_prompts")
#: What a protocol's file is called says nothing of how it measures.
_LEFT_OUT = (*_PROMPTS, "file")


@dataclass(frozen=True)
class Cell:
    """One trial's evaluation in a group."""

    evaluation: Evaluation
    measured: Measured


#: Trial -> name of a protocol file (empty: the recipe's own protocol) -> its evaluation.
_Cells = dict[tuple[str, int], dict[str, Cell]]


@dataclass(frozen=True)
class Group:
    """Evaluations of one model, measured in one way.

    Attributes
    ----------
    protocol
        Fingerprint of the baseline's evaluations, or of the first where the baseline has none.
    name, judge
        For people: the protocol file or the recipe's own; judge, its prompts and the rubrics.
    reward
        Whether this group is of the metric ``reward`` alone (of agents, ``partial`` too).
    cells
        By arm and seed.
    """

    model: str
    decoding: str
    protocol: str
    name: str
    judge: str
    reward: bool
    cells: Mapping[tuple[str, int], Cell]

    @cached_property
    def arms(self) -> tuple[str, ...]:
        """Arms that were measured so."""
        return tuple(dict.fromkeys(arm for arm, _ in self.cells))

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """What was measured, in the order of reports."""
        found = (m for cell in self.cells.values() for m in cell.measured.means.metrics)
        return tuple(m for m in in_order(found) if weighed(m) == self.reward)

    @cached_property
    def agents(self) -> bool:
        """Whether these are attempts of agents, not answers."""
        first = next(iter(self.cells.values()))
        return any(of_tasks(m) for m in first.measured.means.metrics)

    @cached_property
    def protocol_files(self) -> frozenset[str]:
        """Names of the protocol files under which it was measured; ``""`` is the recipe's own."""
        return frozenset(cell.evaluation.protocol_file for cell in self.cells.values())

    def fingerprint(self, cell: Cell) -> str:
        """Of one of its cells."""
        return cell.measured.reward_protocol if self.reward else cell.measured.protocol

    def seeds_of(self, arm: str) -> tuple[int, ...]:
        """Seeds with which an arm was measured, ascending."""
        return self._seeds.get(arm, ())

    @cached_property
    def _seeds(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for arm, seed in self.cells:
            found.setdefault(arm, []).append(seed)
        return {arm: tuple(sorted(seeds)) for arm, seeds in found.items()}


def make_groups(evidence: Evidence) -> list[Group]:
    """All groups in which arms can differ, in the order in which trials have them.

    A model that all arms share (the base model, one SFT for all) is no outcome of the sweep: groups
    in which every seed has one evaluation for all arms are left out.
    """
    families = {fp: _family(protocol) for fp, protocol in evidence.protocols.items()}
    found: dict[tuple[str, str, str, bool], _Cells] = {}
    for trial in evidence.trials:
        for stage in trial.evaluations:
            evaluation = evidence.evaluations[stage]
            for measured in evaluation.measured:
                for reward in (False, True):
                    protocol = measured.reward_protocol if reward else measured.protocol
                    family = families.get(protocol, protocol)
                    key = (evaluation.model, measured.decoding, family, reward)
                    cells = found.setdefault(key, {}).setdefault(trial.place, {})
                    cells.setdefault(evaluation.protocol_file, Cell(evaluation, measured))
    groups = [
        _group(evidence, key, cells)
        for key, places in found.items()
        for cells in _apart(evidence, places)
        if not _shared(evidence, cells)
    ]
    return [group for group in groups if group.metrics]


def _apart(evidence: Evidence, places: _Cells) -> list[dict[tuple[str, int], Cell]]:
    """What is measured alike, but several times in one trial (under the recipe's own protocol and
    under a file that says the same of all but the prompts, for example), each in a group of its
    own; a trial without any that the baseline has stands beside the baseline's in all."""
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


def _shared(evidence: Evidence, cells: Mapping[tuple[str, int], Cell]) -> bool:
    """Whether all arms have the same evaluations."""
    by_seed: dict[int, set[str]] = {}
    for (_, seed), cell in cells.items():
        by_seed.setdefault(seed, set()).add(cell.evaluation.stage)
    several = len(evidence.sweep.arms) > 1 and len({arm for arm, _ in cells}) > 1
    return several and all(len(stages) == 1 for stages in by_seed.values())


def _group(
    evidence: Evidence, key: tuple[str, str, str, bool], cells: dict[tuple[str, int], Cell]
) -> Group:
    model, decoding, _, reward = key
    baseline = evidence.sweep.baseline
    first = next((c for (arm, _), c in cells.items() if arm == baseline), None)
    first = first or next(iter(cells.values()))
    fingerprint = first.measured.reward_protocol if reward else first.measured.protocol
    files = (c.evaluation.protocol_file for c in cells.values())
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
    """``qwen3-32b@v1, instance+static v3``; of agents, where they work and with whom."""
    if environment := protocol.get("environment"):
        return environment_text(environment)
    judge, rubrics = protocol.get("judge") or {}, protocol.get("rubrics") or {}
    who = "@".join(str(judge[k]) for k in ("model", "prompt") if judge.get(k))
    what = " ".join(str(rubrics[k]) for k in ("source", "static") if rubrics.get(k))
    return ", ".join(filter(None, (who, what)))


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
