"""What a report is made of: the records of a sweep as values, per-sample results as arrays.

In: nothing; ``flows.reporting`` fills these from a workspace, tests from a generator. Out:
:class:`Evidence`, which :mod:`.comparing` turns into a report.

An evaluation is kept once however many trials share it. Texts (answers, prompts, judgements) are
not held: :class:`Stored` reads the few that a report shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from refiner_core.contract.sweep_records import SweepRecord
from refiner_core.evaluation.names import domain_of, of_domain
from refiner_core.report.sweep.document import IncidentRow, TrialRow

Floats = npt.NDArray[np.float64]


class PromptMeans(NamedTuple):
    """Metrics per prompt, the mean over its samples.

    ``values`` is [metrics, prompts], NaN where no sample of a prompt has the metric; ``prompts``
    are sample ids in ascending order.
    """

    prompts: tuple[str, ...]
    metrics: tuple[str, ...]
    values: Floats

    def of(self, metric: str) -> Floats | None:
        """One metric [prompts]; None where it was not measured."""
        if metric not in self.metrics:
            return None
        row: Floats = self.values[self.metrics.index(metric)]
        return row

    def about(self, metric: str) -> tuple[tuple[str, ...], Floats | None]:
        """The prompts that a metric is about, and its values there: of a number of one domain
        (``pass@4/retail``) the tasks of that domain, else all."""
        row = self.of(metric)
        if not domain_of(metric):
            return self.prompts, row
        kept = of_domain(metric, self.prompts)
        prompts = tuple(prompt for prompt, about in zip(self.prompts, kept, strict=True) if about)
        return prompts, None if row is None else row[np.array(kept, dtype=bool)]


@dataclass(frozen=True)
class Measured:
    """One decoding of an evaluation.

    Attributes
    ----------
    protocol, reward_protocol
        Fingerprints: of all metrics but ``reward``, and of that.
    means
        The model's answers.
    reference
        The random copier's answers (of agents, the attempts of who does nothing), which are the
        same in all evaluations of a protocol; None where the evaluation has none.
    samples_file
        Where its samples lie, relative to the evaluation's output.
    episodes
        Of agents, what ``results.json`` counts of their attempts
        (:mod:`refiner_core.evaluation.attempts`).
    """

    decoding: str
    protocol: str
    reward_protocol: str
    means: PromptMeans
    reference: PromptMeans | None
    samples_file: str
    episodes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """One evaluate stage that is done. ``protocol_file`` names the protocol that it belongs to,
    empty for the recipe's own."""

    stage: str
    name: str
    model: str
    protocol_file: str
    measured: tuple[Measured, ...]


@dataclass(frozen=True)
class Training:
    """What a training stage logged: metric -> (steps, values), steps ascending."""

    name: str
    metrics: Mapping[str, tuple[npt.NDArray[np.int64], Floats]]


@dataclass(frozen=True)
class TrialEvidence:
    """One trial: how it stands, and ids of its evaluations and training stages that are there.

    ``missing`` names evaluations that are planned and not done.
    """

    row: TrialRow
    stages: Mapping[str, str]
    evaluations: tuple[str, ...] = ()
    trainings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[str, int]:
        """Arm and seed."""
        return self.row.arm, self.row.seed


class RubricScores(NamedTuple):
    """Credit per rubric and prompt, [rubrics, prompts]; NaN where it was not judged.

    Credit is the score of a positive rubric and 1 - score of a negative one. ``rubrics`` are
    (title, kind), where kind is the source and the polarity: ``static-v3, negative``.
    """

    rubrics: tuple[tuple[str, str], ...]
    values: Floats


class Question(NamedTuple):
    """What a prompt asks, and the whole of it."""

    question: str
    prompt: str


class Stored(Protocol):
    """Reads what is too large to be held."""

    def answers(
        self, evaluation: Evaluation, measured: Measured, prompts: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Rows of the samples file for these prompts: first samples only, and of agents the first
        few attempts."""
        ...

    def rubrics(
        self,
        evaluation: Evaluation,
        measured: Measured,
        names: Sequence[tuple[str, str]] | None = None,
    ) -> RubricScores | None:
        """Credit per rubric; None where nothing was judged by rubrics.

        ``names`` are the rubrics wanted, as another evaluation has them; by default those that
        several prompts share, and the rest of each kind together.
        """
        ...

    def questions(self, evaluation: Evaluation, prompts: Sequence[str]) -> dict[str, Question]:
        """What prompts ask; those that cannot be found are left out."""
        ...


@dataclass(frozen=True)
class Evidence:
    """All of a sweep that a report is made of.

    Attributes
    ----------
    trials
        In the order of the sweep.
    evaluations, trainings
        By stage id.
    protocols
        Fingerprint -> what it stands for, as in ``results.json``.
    stored
        None where nothing can be read any more: the report has no texts and no rubrics then.
    """

    sweep: SweepRecord
    made_at: str
    state: Literal["running", "finished", "stopped"]
    trials: tuple[TrialEvidence, ...]
    evaluations: Mapping[str, Evaluation]
    protocols: Mapping[str, Mapping[str, Any]]
    trainings: Mapping[str, Training] = field(default_factory=dict)
    incidents: tuple[IncidentRow, ...] = ()
    stored: Stored | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
