"""Certificates of machines: what `refiner certify` has tried on a node, with figures.

In: checks, each with its verdict. Out: a :class:`Certificate`, as it lies in a workspace. Values;
who reads one decides with :meth:`Certificate.differences` whether it still is of the machine and
the versions that are there.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        """How many checks have this verdict."""
        return sum(check.verdict == verdict for check in self.checks)

    @property
    def passed(self) -> bool:
        """Whether something was tried, and nothing failed."""
        return self.count("fail") == 0 and self.count("pass") > 0

    def figure(self, check: str, name: str) -> float | None:
        """A figure of a check that passed; None where there is none."""
        for one in self.checks:
            if one.name == check and one.verdict == "pass":
                value = one.figures.get(name)
                return float(value) if isinstance(value, int | float) else None
        return None

    def differences(self, versions: Mapping[str, str]) -> list[str]:
        """Versions that are no longer as they were certified, in words; those that one side does
        not know are left out."""
        return [
            f"{name} {versions[name]} (certified: {old})"
            for name, old in sorted(self.versions.items())
            if name in versions and versions[name] != old
        ]
