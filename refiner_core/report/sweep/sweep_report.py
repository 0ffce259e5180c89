"""The report of a sweep as values, shown by its page, Markdown, CSV and JSON.

Every number has its basis: ``n``, an interval, the protocol. A missing number is None, with the
reason beside it; it is never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

REPORT_VERSION = 1
#: Displayed fields by name, as in JSON.
Row = Mapping[str, Any]

#: State of a trial; the last five are of runs without a sweep.
TrialState = Literal[
    "waiting", "running", "done", "failed", "interrupted", "held",
    "not begun", "blocked", "cancelled", "paused", "unreadable",
]  # fmt: skip
#: Verdicts. ``judge moved``: the same answers were scored differently in the meantime, so
#: a difference is no progress. ``not comparable``: other prompts or another protocol.
Verdict = Literal["better", "worse", "not clear", "judge moved", "not comparable", "missing"]


@dataclass(frozen=True)
class NumberKey:
    """Identity of a number: a metric of a model under a decoding of a protocol.

    ``protocol`` is the fingerprint shared by all compared numbers, ``protocol_name`` its readable
    name; ``judge`` names the judge and rubric set of the protocol.
    """

    model: str
    protocol: str
    protocol_name: str
    decoding: str
    metric: str
    judge: str = ""


@dataclass(frozen=True)
class ArmNumber:
    """One arm's number, compared with the baseline.

    ``value``, ``low``, ``high``: mean over seeds and prompts with its 95 % interval.
    ``difference`` is arm minus baseline, paired over seeds and prompts, with its interval; ``p``
    and ``p_adjusted`` (Holm, over the arms of this number) are two-sided. ``n`` prompts are
    included, ``excluded`` are not. ``note`` explains missing or unreliable values. For the
    baseline itself the difference is None. ``points`` are trials: ``seed``, ``value``, ``n``, and
    ``difference`` to the baseline's trial with the same seed.
    """

    arm: str
    value: float | None
    low: float | None
    high: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    p: float | None
    p_adjusted: float | None
    n: int
    seeds: int
    excluded: int
    interval: str
    verdict: Verdict | None
    points: tuple[Row, ...]
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """All arms on one number. ``higher_is_better`` is None without a direction (a length)."""

    key: NumberKey
    numbers: tuple[ArmNumber, ...]
    higher_is_better: bool | None
    primary: bool = False


@dataclass(frozen=True)
class SweepReport:
    """The complete report of a sweep at one moment.

    ``factors`` maps factors to their labels, ``arm_levels`` arms to {factor: label}. ``state`` is
    ``running`` while an orchestrator works on it. ``protocols`` describes each protocol by
    fingerprint; ``provenance`` lists the report's sources. ``detectable`` is the
    smallest effect that the primary comparison could detect (80 % power), with its basis.

    Display-only rows are mappings, as in ``report.json``:

    - ``trials``: the ``state`` of a trial, and its cost. Seconds are of its own stages; a stage
      shared by trials counts for the first of them (``shared`` names these).
      ``lost_seconds`` and ``lost_steps`` were repeated; ``queue_seconds`` were spent in the
      scheduler's queue. None: unknown.
    - ``curves``: a ``metric`` of a training ``stage`` over ``steps``, per arm: the mean over seeds
      and the band of all seeds, which is their range and no interval. ``steps``, ``mean``, ``low``
      and ``high`` have one length.
    - ``matrix``: one judge with one rubric set (``protocol``, ``judge``, ``rubrics``, ``metric``,
      ``decoding``). ``trains`` are arms that it rewards: a judge that trains none is held out.
      ``cells`` have an ``arm``, its mean with its interval and its ``rank`` among arms, which is
      missing if the judge has ``moved`` between its evaluations and the baseline's.
    - ``rubrics``: mean scores of a ``rubric`` by arm (``values``), and ``differences`` to the
      baseline by arm: (difference, low, high).
    - ``flips``: prompts on which an ``arm`` and the baseline differ most: means over seeds and
      samples, and the number of ``seeds`` that agree.
    - ``side_by_side``: a prompt with ``answers`` of arms: ``text``, ``metrics``, ``judgements``; of
      an agent's attempt ``episode`` is the JSON of its
      :class:`~refiner_core.environments.protocol.EpisodeRecord`, and ``text`` is empty.
    - ``attempts``: outcomes of an arm's attempts at the tasks of a domain, over all its seeds:
      ``asked`` = ``passed`` + all of ``failures`` (by class) + all of ``errors`` (of the
      infrastructure, by kind; they do not count as attempts).
    - ``people``: means corrected by people's labels, by ``arm`` and ``seed``: a ``metric`` of a
      ``stage`` (model) with its interval, ``n`` labelled answers, and ``judged``, the judge's mean.
    - ``monitors``: trials of an ``arm`` with a monitor, steps of their ``alarms`` and of those that
      ``stopped``, and mean proxy and gold at the last step ``at`` which all trials were looked at,
      at the end, and at the best step by gold.
    - ``incidents``: problems in a trial, and whether each is ``resolved``.
    """

    version: int
    sweep: str
    title: str
    question: str
    made_at: str
    state: Literal["running", "finished", "stopped"]
    recipe: str
    baseline: str
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    factors: Mapping[str, tuple[str, ...]]
    arm_levels: Mapping[str, Mapping[str, str]]
    trials: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    curves: tuple[Row, ...] = ()
    matrix: tuple[Row, ...] = ()
    rubrics: tuple[Row, ...] = ()
    flips: tuple[Row, ...] = ()
    side_by_side: tuple[Row, ...] = ()
    attempts: tuple[Row, ...] = ()
    people: tuple[Row, ...] = ()
    monitors: tuple[Row, ...] = ()
    incidents: tuple[Row, ...] = ()
    protocols: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    detectable: Mapping[str, Any] = field(default_factory=dict)
    forecast: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def primary(self) -> Comparison | None:
        """The comparison that answers the sweep's question."""
        return next((c for c in self.comparisons if c.primary), None)


@dataclass(frozen=True)
class RunsReport(SweepReport):
    """The report of several runs: each is an arm, the first is the baseline.

    Further rows:

    - ``runs``: ``run``, ``arm``, ``seed``, ``recipe``, ``started``, ``state``, ``label`` (note and
      tags).
    - ``settings``: fields that differ, then others with other values than their defaults:
      ``field``, ``mark``, ``differs``, ``own`` (given on the command line of a run, not by its
      recipe), ``values`` by arm.
    """

    runs: tuple[Row, ...] = ()
    settings: tuple[Row, ...] = ()


def leading(
    arms: Iterable[str], baseline: str, changes: Mapping[str, float | None], most: int
) -> list[str]:
    """The baseline, then the arms that differ most from it, in the order of arms."""
    others = [arm for arm in arms if arm != baseline]
    kept = sorted(others, key=lambda arm: -abs(changes.get(arm) or 0.0))[: most - 1]
    return [baseline, *(arm for arm in others if arm in set(kept))]


PAGE = "report.html"
TEXT = "report.md"
NUMBERS = "report.csv"
TRIALS = "trials.csv"
VALUES = "report.json"
