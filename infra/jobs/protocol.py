"""Jobs: what one is, what it runs, and what is asked of whatever runs it.

In: claimed attempts and how to run them. Out: jobs that outlive whoever submitted them, and one
look at all of them at once. Implementers: :class:`infra.jobs.dispatch.LocalDispatcher` (this
machine), :class:`infra.slurm.dispatcher.SlurmDispatcher`, a simulated world in tests;
:class:`infra.jobs.dispatch.Router` picks one per stage.

A job runs an argument list, never a pickled closure: ``env … python -P -m flows.worker --workspace
W STAGE ATTEMPT`` with the settings that it needs. Settings travel in the command, where they can
be seen; secrets only in the environment that a job inherits.
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
from refiner_core.contract.records import Attempt, Outcome

Sight = Literal[
    "live",  # it runs, or is on its way to
    "dead",  # it is certain that nothing of it runs any more
    "hung",  # it runs and has shown no sign of life, or no progress, for too long
    "unknown",  # not looked at yet, or nobody could say
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
    ``save_s`` is the longest that a checkpoint has taken so far: the warning before a time limit
    comes that much earlier. ``avoid`` names nodes that have failed this stage. ``nice`` is how far
    it gives way to other local jobs (0: not at all).
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
        """The attempt that it is for."""
        return AttemptRef(self.stage_id, self.attempt)


@dataclass(frozen=True)
class JobSight:
    """One job as its dispatcher sees it now.

    Attributes
    ----------
    sight
        Never ``hung``: that is for who watches heartbeats to say.
    running
        Its processes run, so that it owes a heartbeat (not while it queues or is suspended).
    local
        It takes one of this machine's slots.
    state, reason
        In the scheduler's words (``PENDING``, ``Resources``), for people.
    held
        The scheduler holds it back after a failed start, until somebody releases it.
    end
        Why it ended, where the dispatcher knows: of use when the worker left no word.
    facts
        What the scheduler said about the end (states, exit codes, nodes), to be recorded.
    node
        Where it runs or ran.
    lost
        It is ``dead`` because nobody knows it any more: a worker that shows signs of life knows
        better.
    """

    sight: Sight
    running: bool = True
    local: bool = False
    state: str = ""
    reason: str = ""
    held: bool = False
    end: Outcome | None = None
    facts: Mapping[str, str] | None = None
    node: str = ""
    lost: bool = False


@dataclass(frozen=True)
class OpenAttempt:
    """An attempt without an outcome, and what the workspace says of it.

    ``started`` is the content of ``started.json``: None before its worker has taken the token.
    """

    ref: AttemptRef
    attempt: Attempt
    started: Mapping[str, str] | None = None

    @property
    def begun(self) -> bool:
        """Tell whether its worker has taken the token, and not whoever gave the attempt up."""
        return self.started is not None and not self.started.get("void")


class Dispatcher(Protocol):
    """Dispatcher of jobs."""

    executor: str

    def check(self, stage: PlannedStage) -> None:
        """Refuse, before anything is submitted, a stage that can never run there.

        Raises
        ------
        RefinerError
            Says what it asks for, and what there is.
        """

    def submit(self, requests: Sequence[JobRequest]) -> Mapping[AttemptRef, Exception]:
        """Start jobs, as one array where that saves the scheduler work, and record each one's id
        beside its attempt (``job.json``). Returns what went wrong, for those that did not start.
        """

    def look(self, attempts: Sequence[OpenAttempt]) -> Mapping[AttemptRef, JobSight]:
        """Look at these jobs, by one query for all of them. Never raises for a scheduler that does
        not answer: such jobs are ``unknown``."""

    def stop(self, attempt: OpenAttempt) -> bool:
        """Ask the worker to save and end. False: there is nothing to ask yet, or any more."""

    def kill(self, attempt: OpenAttempt) -> bool:
        """End the job and all it has started, now; one that queues is withdrawn. False: the order
        did not get through, and the job may go on."""

    def release(self, attempt: OpenAttempt) -> None:
        """Let a held job start again."""


#: Settings of a job that must not look for the internet.
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
        # Part of what is computed (`model.cpu_threads`), so the caller's own setting is overruled.
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        # Bars that redraw themselves are rubble in a log.
        "TQDM_DISABLE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if shared := os.environ.get(SHARED):
        settings[SHARED] = shared  # a site may have jobs begin without their user's environment
    # An empty or relative part would put the working directory in front of everything.
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [p for p in given if p and Path(p).is_absolute()]
    first = [str(code)] if code is not None else []
    ours = [str(Path(__file__).resolve().parents[2])]
    settings["PYTHONPATH"] = os.pathsep.join([*first, *kept] or ours)
    return settings


def tail_of(files: Sequence[Path], size: int = 20_000) -> str:
    """The end of what was printed into these files."""
    texts = [""] * len(files)
    for number, path in enumerate(files):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            texts[number] = file.read().decode(errors="replace")
    return "\n".join(texts)
