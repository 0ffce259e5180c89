"""Evidence about machines and trainings: certificates of nodes, proofs of exact resume.

In: checks with verdicts and figures; how two trainings compare, one undisturbed, one interrupted.
Out: values whose verdict is made from what they hold and stands nowhere by itself, so that whoever
has the record can make it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

#: Version of a certificate's file. Raised when an older reader would misread it.
CERTIFICATE_VERSION = 1

#: ``absent``: what would be tried is not there (no GPU, DeepSpeed, vLLM), or no time was left.
CheckVerdict = Literal["pass", "fail", "absent"]


@dataclass(frozen=True)
class CertifiedCheck:
    """One check.

    Attributes
    ----------
    name
        What was tried, such as ``kernel sdpa``, ``zero-2 x 4`` or ``sft throughput``.
    verdict
        Whether it held.
    why
        A line: the figure against its tolerance, or what is missing.
    figures
        Numbers by name, with the unit in the name (``tokens_per_s``, ``gap_max``).
    """

    name: str
    verdict: CheckVerdict
    why: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Certificate:
    """All checks of one node at one time.

    Attributes
    ----------
    made_at
        When, in UTC (ISO 8601).
    host
        :func:`infra.store.provenance.host` of the node.
    gpus
        Names of its GPUs as torch has them; empty where the checks ran on the CPU.
    versions
        Of torch, CUDA, NCCL, the driver, transformers and DeepSpeed, as far as they are there.
    model
        The shape that throughput was measured with: ``tiny``, ``0.6B``, ``1.7B``, ``4B``.
    dtype
        ``float32`` or ``bfloat16``.
    seconds
        How long all of it took.
    """

    made_at: str
    host: Mapping[str, Any]
    gpus: tuple[str, ...]
    versions: Mapping[str, str]
    model: str
    dtype: str
    seconds: float
    checks: tuple[CertifiedCheck, ...]
    version: int = CERTIFICATE_VERSION

    def count(self, verdict: CheckVerdict) -> int:
        """Say how many checks have this verdict."""
        return sum(check.verdict == verdict for check in self.checks)

    @property
    def passed(self) -> bool:
        """Say whether something was tried, and nothing failed."""
        return self.count("fail") == 0 and self.count("pass") > 0


#: Version of a proof's file. Raised when an older reader would misread it.
PROOF_VERSION = 1

#: How the names of metrics begin that measure an execution: a clock, the machine, or what a judge's
#: store knew already decides them. They are no part of a comparison of two runs.
MEASURED = ("time/", "judge/", "memory/", "system/", "tokens_per_second")

Verdict = Literal["bitwise", "within tolerance", "diverged"]
How = Literal["kill", "stop"]


@dataclass(frozen=True)
class Interruption:
    """One of a training's interruptions, as it was: in which step and phase its worker was hit.

    ``how``: ``kill`` is SIGKILL to the worker's process group, ``stop`` the request to save and end
    that a scheduler sends (SIGTERM). ``resumed_from_step`` is the checkpoint that the next attempt
    went on from; None: it began anew.
    """

    step: int
    phase: str
    how: How
    attempt: int
    resumed_from_step: int | None = None


@dataclass(frozen=True)
class Comparison:
    """How one quantity compares.

    Attributes
    ----------
    quantity
        ``loss trace``, ``rollouts``, ``weights``, ``data cursor``, ``optimiser``, ``random
        states``.
    compared, differing
        How many values were compared (numbers, rows, tensors), and how many of them are not bitwise
        the same.
    largest
        The largest difference of those; None where one has no size (a step or value is missing, a
        text or a random state is another).
    first_step, first
        Where the first of them stands (None: at the end), and what it is.
    """

    quantity: str
    compared: int
    differing: int = 0
    largest: float | None = 0.0
    first_step: int | None = None
    first: str = ""

    def within(self, tolerance: float) -> bool:
        """Say whether every difference has a size, and none is larger."""
        return not self.differing or (self.largest is not None and self.largest <= tolerance)


@dataclass(frozen=True)
class ResumeProof:
    """One training stage, run straight and interrupted.

    Attributes
    ----------
    stage, stage_id, fingerprint
        The stage of the whole recipe that this is about.
    short_fingerprint
        Of the shortened stage that was run.
    overrides
        What the caller had overridden; ``changed`` is what the proof has: field -> value in effect.
    steps
        Optimiser steps of the straight run.
    seed, how
        What the points were drawn with, and which interruptions were asked for.
    wanted
        How many interruptions were asked for; a short stage may end before all have come.
    processes, resume_processes
        Training processes per node of the straight run and before the first interruption, and
        after it; None is what the recipe says.
    tolerance
        Largest difference that counts as none; 0 where only the same bits will do.
    """

    version: int
    recipe: str
    stage: str
    stage_id: str
    fingerprint: str
    short_fingerprint: str
    overrides: tuple[str, ...]
    changed: Mapping[str, Any]
    steps: int
    seed: int
    how: str
    wanted: int
    interruptions: tuple[Interruption, ...]
    comparisons: tuple[Comparison, ...]
    tolerance: float
    processes: int | None = None
    resume_processes: int | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    made_at: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Made from the comparisons and the tolerance. Resumed on another number of processes it
        is at best `within tolerance`: that a sum came out alike says nothing of the next one."""
        found = verdict_of(self.comparisons, self.tolerance)
        return "within tolerance" if found == "bitwise" and not self.same_processes else found

    @property
    def same_processes(self) -> bool:
        """Say whether it was resumed on as many processes as it was begun with."""
        return self.resume_processes in (None, self.processes)

    @property
    def first(self) -> Comparison | None:
        """What differs first: by step, and at one step in the order in which things come about."""
        found = [c for c in self.comparisons if c.differing]
        return min(found, key=lambda c: self.steps if c.first_step is None else c.first_step,
                   default=None)  # fmt: skip

    @property
    def largest(self) -> float | None:
        """The largest difference of all; None where one has no size."""
        sizes = [c.largest for c in self.comparisons if c.differing]
        return None if None in sizes else max((s for s in sizes if s is not None), default=0.0)


def verdict_of(comparisons: Sequence[Comparison], tolerance: float) -> Verdict:
    """``bitwise`` where nothing differs, ``within tolerance`` where every difference has a size
    that is no larger, else ``diverged``."""
    if not any(c.differing for c in comparisons):
        return "bitwise"
    return "within tolerance" if all(c.within(tolerance) for c in comparisons) else "diverged"
