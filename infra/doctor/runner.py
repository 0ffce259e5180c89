"""All checks at once, none waited for longer than its limit.

In: checks and a :class:`~infra.doctor.check.Look`. Out: findings, in the order of the checks. A
check that hangs (a dead NFS server, a Slurm controller or a Hub that takes calls and never answers)
becomes a finding that says so; its thread is left behind, which keeps no process from ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from infra.doctor.check import Check, Finding, Look, State
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
    jobs = [_Job(check, look, room, limit_s) for check in checks]
    for job in jobs:
        job.thread.start()
    found: list[Finding] = []
    for number, job in enumerate(jobs, 1):
        found += job.findings()
        tell(number, len(jobs))
    return sorted(found, key=lambda f: AREAS.index(f.area) if f.area in AREAS else len(AREAS))


class _Job:
    """One check on its way."""

    def __init__(
        self, check: Check, look: Look, room: threading.Semaphore, limit_s: float | None
    ) -> None:
        self.check, self._look, self._room = check, look, room
        self.limit_s = check.limit_s if limit_s is None else min(limit_s, check.limit_s)
        self._found: list[Finding] | None = None
        self._began: float | None = None
        self.thread = threading.Thread(target=self._work, daemon=True, name=f"doctor {check.name}")

    def _work(self) -> None:
        with self._room:
            self._began = time.monotonic()
            found = _looked(self.check, self._look)
            seconds = time.monotonic() - self._began
            self._found = [replace(f, seconds=round(seconds, 3)) for f in found]

    def findings(self) -> list[Finding]:
        """What it has found, once it has, or that it gives no answer."""
        while self._found is None:
            if self._began is not None and time.monotonic() - self._began > self.limit_s:
                # Who waits for a turn shall not wait for one that never ends.
                self._room.release()
                return [self._no_answer()]
            self.thread.join(0.02)
        return self._found

    def _no_answer(self) -> Finding:
        return Finding(
            self.check.area,
            self.check.name,
            "broken" if self.check.needed(self._look) else "warning",
            f"no answer in {self.limit_s:g} s",
            mend=self.check.hung,
            seconds=self.limit_s,
        )


def _looked(check: Check, look: Look) -> Iterable[Finding]:
    state: State = "broken" if check.needed(look) else "warning"
    try:
        return list(check.look(look))
    except RefinerError as error:
        return [Finding(check.area, check.name, state, error.what, mend=error.fix)]
    except OSError as error:
        what = f"the system refused: {error}"
        return [Finding(check.area, check.name, state, what, mend=check.hung)]
    except Exception as error:  # the others' findings are worth having all the same
        what = f"this check itself failed ({type(error).__name__}: {error})"
        return [Finding(check.area, check.name, "warning", what, mend="refiner doctor --debug")]
