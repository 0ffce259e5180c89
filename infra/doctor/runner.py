"""All checks at once, none waited for longer than its limit.

In: checks and a :class:`~infra.doctor.check.Look`. Out: findings, in the order of the checks. A
check that hangs (a dead NFS server, a Slurm controller or a Hub that takes calls and never answers)
becomes a finding that says so; its thread is left behind, which keeps no process from ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from infra.doctor import (
    gpu,
    hub,
    machine,
    network,
    packages,
    prefect,
    serving,
    slurm,
    tracking,
    workspace,
)
from infra.doctor.check import Check, Finding, Look, doubtful, found
from refiner_core.contract.errors import RefinerError

#: The order in which areas are shown.
AREAS = (
    *("recipe", "python", "machine", "gpu", "workspace", "slurm", "node"),
    *("prefect", "hub", "wandb", "judge", "vllm", "network"),
)
#: So many look at the same time: they mostly wait for others.
_AT_ONCE = 12


def all_checks() -> list[Check]:
    """Every check of this package. What a recipe's own parts need is added in ``flows.doctor``."""
    modules = (
        *(packages, machine, gpu, workspace, slurm),
        *(prefect, hub, tracking, serving, network),
    )
    return [check for module in modules for check in module.CHECKS]


def run_checks(
    checks: Sequence[Check],
    look: Look,
    *,
    limit_s: float | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """The findings of all checks.

    Parameters
    ----------
    limit_s
        No check gets more than this, seconds; by default its own limit.
    tell
        Told how many of how many are done.
    """
    room = threading.Semaphore(_AT_ONCE)
    jobs = [_Job(check, look, room) for check in checks]
    findings: list[Finding] = []
    for number, job in enumerate(jobs, 1):
        findings += job.findings(min(job.check.limit_s, limit_s or job.check.limit_s))
        tell(number, len(jobs))
    return sorted(findings, key=lambda f: AREAS.index(f.area) if f.area in AREAS else len(AREAS))


class _Job:
    """One check on its way."""

    def __init__(self, check: Check, look: Look, room: threading.Semaphore) -> None:
        self.check, self._look, self._room = check, look, room
        self._found: list[Finding] | None = None
        self._began: float | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        with self._room:
            self._began = time.monotonic()
            made = self._looked()
            seconds = round(time.monotonic() - self._began, 3)
            self._found = [self._named(one, seconds) for one in made]

    def _looked(self) -> list[Finding]:
        try:
            made = self.check.look(self._look) or ()
            return [made] if isinstance(made, Finding) else list(made)
        except RefinerError as error:
            return [found(doubtful(self.check.needed(self._look)), error.what, error.fix)]
        except OSError as error:
            what = f"the system refused: {error}"
            return [found(doubtful(self.check.needed(self._look)), what, self.check.hung)]
        except Exception as error:  # the others' findings are worth having all the same
            what = f"this check itself failed ({type(error).__name__}: {error})"
            return [found("warning", what, "refiner doctor --debug")]

    def _named(self, one: Finding, seconds: float) -> Finding:
        area, name = one.area or self.check.area, one.name or self.check.name
        return replace(one, area=area, name=name, seconds=seconds)

    def findings(self, limit_s: float) -> list[Finding]:
        """Findings, once it has them, or that it gives no answer."""
        while self._found is None:
            if self._began is not None and time.monotonic() - self._began > limit_s:
                # Who waits for a turn shall not wait for one that never ends.
                self._room.release()
                state = doubtful(self.check.needed(self._look))
                return [
                    self._named(
                        found(state, f"no answer in {limit_s:g} s", self.check.hung), limit_s
                    )
                ]
            self._thread.join(0.02)
        return self._found
