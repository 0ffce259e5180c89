"""The report of a run as values, shown by its page and its JSON.

In: nothing; :mod:`flows.reporting.run` fills these from the records of a workspace, and
:mod:`refiner_core.report.run.rendering` renders them. An unknown number is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RUN_REPORT_VERSION = 1
#: Displayed fields by name, as in JSON.
Row = Mapping[str, Any]
#: Outcome of a running attempt.
UNDER_WAY = "under way"


@dataclass(frozen=True)
class StageRow:
    """One stage of the run.

    ``state`` is that of ``refiner status``, or ``unreadable`` if its records are damaged, which
    ``reason`` then explains. ``skipped``: it existed before the run started, made by
    ``made_by``. ``seconds`` are of all its attempts. ``output_bytes`` is the size of its output.

    The times of each of ``attempts`` are the writers' own, ISO 8601 in UTC, with ``seconds`` of
    work; ``outcome`` is ``done``, a failure class, or :data:`UNDER_WAY`; for an attempt that is not
    running and has no recorded end, the state of its stage (``killed``, …).
    """

    name: str
    kind: str
    id: str
    fingerprint: str
    state: str
    skipped: bool = False
    made_by: str = ""
    reason: str = ""
    inputs: tuple[str, ...] = ()
    seconds: float | None = None
    queue_seconds: float | None = None
    lost_seconds: float = 0.0
    gpu_hours: float | None = None
    cpu_hours: float | None = None
    step: int | None = None
    total: int | None = None
    attempts: tuple[Row, ...] = ()
    output: str = ""
    output_bytes: int | None = None


#: For a run whose disk or work was not checked.
NO_DISK: Row = {
    **{"used": {}, "free_bytes": None, "limit_bytes": None},
    **{"source": "", "reclaimed_bytes": 0},
}
NO_COST: Row = {
    **dict.fromkeys(("seconds", "gpu_hours", "cpu_hours", "money")),
    **{"currency": "", "lost_seconds": 0.0, "lost_steps": 0, "judge": {}},
}


@dataclass(frozen=True)
class RunReport:
    """The complete report of a run at one moment.

    ``state``: ``running`` while an orchestrator works on it, else ``done``, ``failed`` or
    ``stopped``. ``note`` and ``tags`` are from ``refiner tag``. ``settings`` are the fields with
    other values than their defaults (dotted name -> value), ``overrides`` those set on the command
    line; secrets are left out of both.

    Display-only rows are mappings, as in ``report.json``:

    - ``curves``: a ``metric`` of a training ``stage`` over its ``steps``; ``values`` has None if
      it was not logged, or not finite. ``from_attempts`` are the steps at which a further attempt
      took over.
    - ``numbers``: an evaluated number of a ``model`` with its 95 % interval and its protocol:
      ``protocol`` is the fingerprint (metrics with weights, such as ``reward``, have a different
      one than the others), ``under`` the name of the protocol file,
      empty for the recipe's own settings: numbers with one ``under`` and ``decoding`` belong in one
      table. ``reference``: not a model of this run, but its reference (the random copier;
      for agents doing nothing). They are in the order of training, references last.
    - ``changes``: the change of a number by training: ``after`` minus ``before``, paired over
      the prompts, with its 95 % interval; ``n`` counts prompts. The first trained model (or the
      base) against the last one comes first.
    - ``incidents``: problems (``at``, ``stage``, ``text``), and whether each is ``resolved``.
    - ``examples``: a prompt with answers of several models, or of one model in the course of its
      training. ``kind`` is ``before and after`` (the evaluated models, in the order of training) or
      ``rollout`` (samples of one step of GRPO); ``why`` is the reason of its choice (``improved
      most``, ``got worse most``, ``typical``, ``best``, ``worst``, ``no score``); ``change`` is
      after minus before. Each of ``said`` is an answer of a ``model`` (``sft``, ``grpo``, or ``step
      12`` of training) or an attempt of an agent: then ``episode`` is the JSON of an
      :class:`~refiner_core.environments.protocol.EpisodeRecord`, and ``text`` is empty. Its
      ``parts`` are those of its reward: the raw ``value``, the ``weight``, and the ``share`` that
      it added; known shares add up to the reward; a part of weight 0 was only measured.
      ``sample`` is its name on the page of all samples.
    - ``disk``: the run's usage by kind of file (``used``), and free space; bytes.
    - ``cost``: of attempts at the run's own stages since it started; None if unknown.
    - ``published``: checkpoints, by stage, with ``target``, ``card`` and ``step``.
    """

    version: int
    run: str
    recipe: str
    description: str
    state: Literal["running", "done", "failed", "stopped"]
    state_text: str
    command: tuple[str, ...]
    workspace: str
    began_at: str
    ended_at: str
    made_at: str
    note: str = ""
    tags: tuple[str, ...] = ()
    agent: bool = False
    stages: tuple[StageRow, ...] = ()
    incidents: tuple[Row, ...] = ()
    curves: tuple[Row, ...] = ()
    numbers: tuple[Row, ...] = ()
    changes: tuple[Row, ...] = ()
    examples: tuple[Row, ...] = ()
    disk: Row = field(default_factory=lambda: NO_DISK)
    cost: Row = field(default_factory=lambda: NO_COST)
    published: tuple[Row, ...] = ()
    overrides: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    next_commands: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
