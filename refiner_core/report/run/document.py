"""The report of a run as values: all that its page and its JSON show.

In: nothing; :mod:`flows.reporting.run` fills these from the records of a workspace, and
:mod:`refiner_core.report.run.rendering` draws them. A number that is not known is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RUN_REPORT_VERSION = 1
#: What is shown of one thing, by name, as JSON has it.
Row = Mapping[str, Any]
#: Outcome of an attempt that is at work.
UNDER_WAY = "under way"


@dataclass(frozen=True)
class StageRow:
    """One stage of the run.

    ``state`` is that of ``refiner status``, or ``unreadable`` where its records are damaged, which
    ``reason`` then explains. ``skipped``: it was there before the run began, made by
    ``made_by``. ``seconds`` are of all its attempts. ``output_bytes`` is what its output takes.

    Of each of ``attempts`` times are the writers' own, ISO 8601 in UTC, and ``seconds`` of work;
    ``outcome`` is ``done``, a failure class, or :data:`UNDER_WAY`; of an attempt that nobody has
    recorded an end of, and that is not at work either, how its stage stands (``killed``, …).
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


#: Of a run whose disk, or whose work, nobody has looked at.
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
    """Everything about a run at one moment.

    ``state``: ``running`` as long as somebody works on it, else ``done``, ``failed`` or
    ``stopped``. ``settings`` are the fields whose values are not their defaults (dotted name ->
    value), ``overrides`` what of that was said on the command line; secrets are left out of both.

    Rows that are only shown are mappings, as ``report.json`` has them:

    - ``curves``: a ``metric`` of a training ``stage`` over its ``steps``; ``values`` has None where
      it was not logged, or not finite. ``from_attempts`` are the steps at which a further attempt
      took over.
    - ``numbers``: an evaluated number of a ``model`` with its 95 % interval and what it was
      measured by: ``protocol`` is the fingerprint (of a metric that is weighed, such as ``reward``,
      it is another one than that of the others beside it), ``under`` the name of the protocol file,
      empty for the recipe's own settings: numbers with one ``under`` and ``decoding`` belong in one
      table. ``reference``: not a model of this run, but what stands beside it (the random copier;
      of agents doing nothing). They come in the order of training, references last.
    - ``changes``: what training has changed of a number: ``after`` minus ``before``, paired over
      the prompts, with its 95 % interval; ``n`` counts prompts. The first trained model (or the
      base) against the last one comes first.
    - ``incidents``: what went wrong (``at``, ``stage``, ``text``), and whether it is ``resolved``.
    - ``examples``: a prompt with what several models, or one in the course of its training, said to
      it. ``kind`` is ``before and after`` (the evaluated models, in the order of training) or
      ``rollout`` (samples of one step of GRPO); ``why`` says why it was chosen (``improved most``,
      ``got worse most``, ``typical``, ``best``, ``worst``, ``no score``); ``change`` is after minus
      before. Each of ``said`` is an answer of a ``model`` (``sft``, ``grpo``, or ``step 12`` of
      training) or an attempt of an agent: then ``episode`` is the JSON of an
      :class:`~refiner_core.environments.protocol.EpisodeRecord`, and ``text`` is empty. Its
      ``parts`` are those of its reward: the raw ``value``, the ``weight``, and the ``share`` that
      it added; shares add up to the reward, where they are known; a part of weight 0 was measured
      only.
    - ``disk``: what the run takes by kind of file (``used``), and what is left; bytes.
    - ``cost``: of attempts at the run's own stages since it began; None where nobody knows.
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
