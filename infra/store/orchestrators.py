"""Who works on a run, as far as one can tell from here.

In: a workspace and a run's id. Out: an :class:`Orchestrator`. A process of this host can be looked
at; of one on another host only its own word is known: what it wrote when it began and ended. Turns
see to it that of several that take up a run at once, one does.
"""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

from infra.host.processes import ProcessId
from infra.store.layout import call_title
from infra.store.record_files import now_text
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError

Standing = Literal[
    "none",  # nobody has ever taken the run up
    "running",
    "elsewhere",  # it runs on another host, or was cut off there: it cannot be looked at from here
    "ended",  # by itself: every stage was in a final state, or an error came
    "gone",  # killed, or its host was restarted
]


@dataclass(frozen=True)
class Orchestrator:
    """The newest process that took a run up.

    ``job`` is the Slurm job that it is, if any; ``turn`` counts who took the run up so far.
    """

    standing: Standing
    turn: int = 0
    pid: int = 0
    host: str = ""
    job: str = ""
    exit_code: int | None = None
    at: str = ""

    @property
    def works(self) -> bool:
        """Whether it works on the run, or may do so."""
        return self.standing in ("running", "elsewhere")

    @property
    def where(self) -> str:
        """``process 4711 on node7 (job 99)``."""
        job = f" (job {self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


def orchestrator_of(workspace: Workspace, run_id: str) -> Orchestrator:
    """Who works on a run."""
    number, turn = workspace.newest_turn(run_id)
    said = workspace.read_orchestrator(run_id) or {}
    text = str(turn.get("process") or said.get("process") or "")
    if not text:
        return Orchestrator("none", number)
    process = ProcessId.parse(text)
    own = said if said.get("process") == text else {}
    standing = _standing(process, own)
    return Orchestrator(
        standing,
        number,
        process.pid,
        process.host,
        str(turn.get("job") or ""),
        own.get("exit_code"),
        str(own.get("at") or turn.get("at") or ""),
    )


def wanted_by_others(workspace: Workspace, ours: AbstractSet[str]) -> dict[str, str]:
    """Stage id -> a run that is not ours, that a process here works on, and that has the stage.

    One that is said to work on another host may be long gone: it keeps nobody from ending jobs.
    """
    found: dict[str, str] = {}
    for other in workspace.runs():
        if other.run not in ours and orchestrator_of(workspace, other.run).standing == "running":
            found |= dict.fromkeys(other.stages.values(), other.run)
    return found


def _standing(process: ProcessId, said: dict[str, Any]) -> Standing:
    if said.get("state") == "ended":
        return "ended"
    if process.here:
        return "running" if process.alive else "gone"
    return "elsewhere"


def take_up(workspace: Workspace, run_id: str, *, regardless: bool = False) -> None:
    """Take a run up in this process.

    Parameters
    ----------
    regardless
        Also where another host's process says that it works on it, and cannot be looked at.

    Raises
    ------
    ConfigurationError
        Another process works on it.
    """
    before, job = orchestrator_of(workspace, run_id), os.environ.get("SLURM_JOB_ID", "")
    requeued = bool(job) and before.job == job  # Slurm has started the same job again
    if before.standing == "running" or (before.works and not (requeued or regardless)):
        raise busy_error(run_id, before)
    mine = {"process": str(ProcessId.of()), "job": job, "at": now_text()}
    if not workspace.take_turn(run_id, before.turn, mine):
        raise busy_error(run_id, orchestrator_of(workspace, run_id))


def require_idle(workspace: Workspace, run_id: str, *, regardless: bool = False) -> None:
    """Refuse a call that another process works on; ``regardless`` as for :func:`take_up`.

    Raises
    ------
    ConfigurationError
        Somebody does.
    """
    who = orchestrator_of(workspace, run_id)
    if who.standing == "running" or (who.works and not regardless):
        raise busy_error(run_id, who)


def busy_error(run_id: str, who: Orchestrator) -> ConfigurationError:
    """Why a run cannot be taken up now, and what to do instead."""
    title = call_title(run_id)
    name = title.partition(" ")[2]
    look = f"look with `refiner status {name}`, or end it with `refiner cancel {name}`"
    if who.standing == "elsewhere":
        look += (
            f"; if you know that it is gone: `refiner resume {name} --take-over`, which goes on "
            "without it"
        )
    return ConfigurationError(
        f"{title[0].upper()}{title[1:]} is worked on already, by {who.where}.",
        expected=f"a {title.partition(' ')[0]} that nobody works on",
        fix=look,
    )
