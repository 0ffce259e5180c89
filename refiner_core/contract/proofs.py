"""Evidence about machines and trainings: certificates of nodes, proofs of exact resume.

In: checks with verdicts and figures; comparisons of two trainings, one undisturbed, one
interrupted. Out: values whose verdict is computed from their content and never stored, so that any
reader of the record can compute it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

#: Version of a certificate's file. Raised when an older reader would misread it.
CERTIFICATE_VERSION = 1

#: ``absent``: the subject is missing (no GPU, DeepSpeed, vLLM), or no time was left.
CheckVerdict = Literal["pass", "fail", "absent"]


@dataclass(frozen=True)
class CertifiedCheck:
    """One check.

    Attributes
    ----------
    name
        Its subject, such as ``kernel sdpa``, ``zero-2 x 4`` or ``sft throughput``.
    verdict
        Whether it passed.
    why
        A line: the figure with its tolerance, or what is missing.
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
        Time in UTC (ISO 8601).
    host
        :func:`infra.store.provenance.host` of the node.
    gpus
        Names of its GPUs from torch; empty if the checks ran on the CPU.
    versions
        Versions of torch, CUDA, NCCL, the driver, transformers and DeepSpeed, if installed.
    model
        The model shape of the throughput measurement: ``tiny``, ``0.6B``, ``1.7B``, ``4B``.
    dtype
        ``float32`` or ``bfloat16``.
    seconds
        Duration of all checks.
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
        """Number of checks with this verdict."""
        return sum(check.verdict == verdict for check in self.checks)

    @property
    def passed(self) -> bool:
        """Tell whether there was a check, and none failed."""
        return self.count("fail") == 0 and self.count("pass") > 0


#: Version of a proof's file. Raised when an older reader would misread it.
PROOF_VERSION = 1

#: Prefixes of metrics that measure an execution: a clock, the machine, or the state of a judge's
#: store affects them. They are excluded from a comparison of two runs.
MEASURED = ("time/", "judge/", "memory/", "system/", "tokens_per_second")

Verdict = Literal["bitwise", "within tolerance", "diverged"]
How = Literal["kill", "stop"]


@dataclass(frozen=True)
class Interruption:
    """One interruption of a training: the step and phase in which its worker was hit.

    ``how``: ``kill`` is SIGKILL to the worker's process group, ``stop`` the request to save and end
    that a scheduler sends (SIGTERM). ``resumed_from_step`` is the checkpoint that the next attempt
    resumed from; None: it started from the beginning.
    """

    step: int
    phase: str
    how: How
    attempt: int
    resumed_from_step: int | None = None


@dataclass(frozen=True)
class ProofComparison:
    """Comparison of one quantity.

    Attributes
    ----------
    quantity
        ``loss trace``, ``rollouts``, ``weights``, ``data cursor``, ``optimiser``, ``random
        states``.
    compared, differing
        Number of compared values (numbers, rows, tensors), and how many of them are not bitwise
        equal.
    largest
        The largest difference; None if one has no size (a step or value is missing, a text or a
        random state differs).
    first_step, first
        The step of the first difference (None: at the end), and its name.
    """

    quantity: str
    compared: int
    differing: int = 0
    largest: float | None = 0.0
    first_step: int | None = None
    first: str = ""

    def within(self, tolerance: float) -> bool:
        """Tell whether every difference has a size within the tolerance."""
        return not self.differing or (self.largest is not None and self.largest <= tolerance)


@dataclass(frozen=True)
class ResumeProof:
    """One training stage, run straight and interrupted.

    Attributes
    ----------
    stage, stage_id, fingerprint
        The stage of the whole recipe.
    short_fingerprint
        Fingerprint of the shortened stage that was run.
    overrides
        The caller's overrides; ``changed`` are those of the proof: field -> value in effect.
    steps
        Optimiser steps of the straight run.
    seed, how
        Seed of the points of interruption, and the requested kinds.
    wanted
        Number of requested interruptions; a short stage may end before all have come.
    processes, resume_processes
        Training processes per node of the straight run and before the first interruption, and
        after it; None is the recipe's number.
    tolerance
        Largest difference that counts as none; 0 requires equal bits.
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
    comparisons: tuple[ProofComparison, ...]
    tolerance: float
    processes: int | None = None
    resume_processes: int | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    made_at: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Computed from the comparisons and the tolerance. After resuming with another number of
        processes it is at best `within tolerance`: an equal sum proves nothing about the next."""
        found = verdict_of(self.comparisons, self.tolerance)
        return "within tolerance" if found == "bitwise" and not self.same_processes else found

    @property
    def same_processes(self) -> bool:
        """Tell whether it was resumed with the original number of processes."""
        return self.resume_processes in (None, self.processes)

    @property
    def first(self) -> ProofComparison | None:
        """The first difference: by step, and within a step in the order of computation."""
        found = [c for c in self.comparisons if c.differing]
        return min(found, key=lambda c: self.steps if c.first_step is None else c.first_step,
                   default=None)  # fmt: skip

    @property
    def largest(self) -> float | None:
        """The largest difference of all; None if one has no size."""
        sizes = [c.largest for c in self.comparisons if c.differing]
        return None if None in sizes else max((s for s in sizes if s is not None), default=0.0)


def verdict_of(comparisons: Sequence[ProofComparison], tolerance: float) -> Verdict:
    """``bitwise`` if nothing differs, ``within tolerance`` if every difference has a size within
    it, else ``diverged``."""
    if not any(c.differing for c in comparisons):
        return "bitwise"
    return "within tolerance" if all(c.within(tolerance) for c in comparisons) else "diverged"
