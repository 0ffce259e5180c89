"""Jobs: their definition, their command, and the interface of dispatchers.

In: claimed attempts and how to run them. Out: jobs that outlive the process that submitted them,
and one observation of all of them. Implementations: :class:`infra.jobs.dispatch.LocalDispatcher`
(this machine), :class:`infra.slurm.dispatcher.SlurmDispatcher`, a simulation in tests;
:class:`infra.jobs.dispatch.Router` picks one per stage.

A job runs an argument list, never a pickled closure: ``env … python -P -m flows.worker --workspace
W STAGE ATTEMPT`` with its settings. Settings travel in the command, where they can be seen; secrets
only in the environment that a job inherits.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from infra.store.workspace import SHARED
from refiner_core.contract.config import Resources
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import Attempt, AttemptOutcome

Liveness = Literal[
    "live",  # it runs, or will
    "dead",  # certainly no process of it runs any more
    "hung",  # it runs, but has shown no sign of life, or no progress, for too long
    "unknown",  # not observed yet, or the scheduler could not tell
]


class AttemptRef(NamedTuple):
    """One attempt in the workspace."""

    stage_id: str
    number: int


@dataclass(frozen=True)
class JobRequest:
    """Request to run one attempt.

    ``comment`` is the attempt's unique mark; ``code`` the folder that the job imports our packages
    from (none: those of this process); ``threads`` the compute threads of one process.
    ``save_s`` is the longest time that a checkpoint has taken so far: the warning before a time
    limit comes that much earlier. ``avoid`` names nodes that have failed this stage. ``nice`` is
    its niceness towards other local jobs (0: none).
    """

    stage_id: str
    attempt: int
    comment: str
    resources: Resources
    kind: str = ""
    needs_network: bool = False
    code: Path | None = None
    threads: int = 1
    save_s: float = 0.0
    avoid: tuple[str, ...] = ()
    nice: int = 0

    @property
    def ref(self) -> AttemptRef:
        """The job's attempt."""
        return AttemptRef(self.stage_id, self.attempt)


@dataclass(frozen=True)
class JobStatus:
    """One job as its dispatcher sees it now.

    Attributes
    ----------
    liveness
        Never ``hung``: only heartbeats show that.
    running
        Its processes run, so that it owes a heartbeat (not while queued or suspended).
    local
        It takes one of this machine's slots.
    state, reason
        In the scheduler's words (``PENDING``, ``Resources``), for people.
    held
        The scheduler holds it back after a failed start, until it is released.
    end
        Why it ended, if the dispatcher knows: used if the worker recorded no outcome.
    facts
        The scheduler's facts about the end (states, exit codes, nodes), to be recorded.
    node
        Where it runs or ran.
    lost
        It is ``dead`` because the scheduler does not know it any more: signs of life of its worker
        overrule that.
    """

    liveness: Liveness
    running: bool = True
    local: bool = False
    state: str = ""
    reason: str = ""
    held: bool = False
    end: AttemptOutcome | None = None
    facts: Mapping[str, str] | None = None
    node: str = ""
    lost: bool = False


@dataclass(frozen=True)
class OpenAttempt:
    """An attempt without an outcome, with its facts from the workspace.

    ``started`` is the content of ``started.json``: None before its worker has taken the token.
    """

    ref: AttemptRef
    attempt: Attempt
    started: Mapping[str, str] | None = None

    @property
    def begun(self) -> bool:
        """Tell whether a worker has taken the token, rather than a process that gave it up."""
        return self.started is not None and not self.started.get("void")


class Dispatcher(Protocol):
    """Dispatcher of jobs."""

    executor: str

    def check(self, stage: PlannedStage) -> None:
        """Refuse, before anything is submitted, a stage that can never run there.

        Raises
        ------
        RefinerError
            Names what it requests, and what there is.
        """

    def submit(self, requests: Sequence[JobRequest]) -> Mapping[AttemptRef, Exception]:
        """Start jobs, as one array where that saves the scheduler work, and record each one's id
        beside its attempt (``job.json``). Returns the errors of jobs that did not start.
        """

    def observe(self, attempts: Sequence[OpenAttempt]) -> Mapping[AttemptRef, JobStatus]:
        """Observe these jobs with one query for all. Never raises if the scheduler does not answer:
        such jobs are ``unknown``."""

    def stop(self, attempt: OpenAttempt) -> bool:
        """Ask the worker to save and end. False: there is no worker yet, or any more."""

    def kill(self, attempt: OpenAttempt) -> bool:
        """End the job and all its processes, now; one that is queued is withdrawn. False: the order
        did not get through, and the job may continue."""

    def release(self, attempt: OpenAttempt) -> None:
        """Let a held job start again."""


#: Settings of a job that must not use the internet.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True)
class WorkerCommand:
    """Command line of workers.

    ``module`` is followed by ``--workspace ROOT STAGE_ID ATTEMPT``; ``python`` is the interpreter.
    """

    root: Path
    module: tuple[str, ...] = ("-m", "flows.worker")
    python: str = sys.executable

    def arguments(self, request: JobRequest, *, offline: bool = False) -> list[str]:
        """The job's argument list."""
        settings = job_settings(request.threads, request.code) | (OFFLINE if offline else {})
        return [
            *("env", *(f"{k}={v}" for k, v in settings.items())),
            *(self.python, "-P", *self.module),
            *("--workspace", str(self.root), request.stage_id, str(request.attempt)),
        ]


def job_settings(threads: int, code: Path | None) -> dict[str, str]:
    """Settings of a job's environment. No secrets: they are visible in its command."""
    settings = {
        # A user's own `infra` folder in the working directory must not shadow ours.
        "PYTHONSAFEPATH": "1",
        # Part of what is computed (`model.cpu_threads`), so it overrules the caller's setting.
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        # Progress bars that redraw themselves clutter a log.
        "TQDM_DISABLE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if shared := os.environ.get(SHARED):
        settings[SHARED] = shared  # a site may start jobs without their user's environment
    # An empty or relative part would put the working directory in front of everything.
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [p for p in given if p and Path(p).is_absolute()]
    first = [str(code)] if code is not None else []
    ours = [str(Path(__file__).resolve().parents[2])]
    settings["PYTHONPATH"] = os.pathsep.join([*first, *kept] or ours)
    return settings


def tail_of(files: Sequence[Path], size: int = 20_000) -> str:
    """The end of the output in these files."""
    texts = [""] * len(files)
    for number, path in enumerate(files):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            texts[number] = file.read().decode(errors="replace")
    return "\n".join(texts)
