"""The orchestrator as a small job of its own, where login nodes kill what runs for long.

In: the command that works on a recorded run, a profile. Out: the id of a job of one core on the
profile's place for CPU jobs, which Slurm may start again: all state is in the workspace, so the
same command goes on. When its time is up it puts itself back into the queue.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infra.jobs.protocol import JobRequest
from infra.slurm.profiles import Profile
from infra.slurm.submission import Submission, Submitter
from refiner_core.contract.config import Resources
from refiner_core.contract.errors import UnsupportedError

#: Where the partition's limit is not in the profile. Longer ones are refused on most clusters.
_TIME_MIN = 24 * 60
_MEMORY_GB = 2
_ASK_TIMEOUT_S = 30.0


def submit_orchestrator(
    command: Sequence[str], profile: Profile, folder: Path, *, name: str = "refiner"
) -> str:
    """Submit a job that runs ``command``; its id.

    Raises
    ------
    UnsupportedError
        There is no Slurm here.
    ConfigurationError
        Slurm refuses what the profile asks for.
    LaunchError
        It did not take the job now.
    """
    if shutil.which("sbatch") is None:
        raise UnsupportedError(
            "The orchestrator cannot be a job: this machine has no `sbatch`.",
            expected="Slurm's commands on the PATH",
            fix="use `--detach`, which leaves it to a process on this machine",
        )
    folder.mkdir(parents=True, exist_ok=True)
    resources = Resources(cpus=1, memory_gb=_MEMORY_GB, time_limit_min=_TIME_MIN)
    limit = profile.place_for(resources).max_time_min
    resources = replace(resources, time_limit_min=limit or _TIME_MIN)
    request = JobRequest("orchestrator", 1, name, resources)
    # Its children must end with it, not hold its job open; and it must come back by itself.
    submitter = Submitter(replace(profile, requeue=True), profile.python or sys.executable)
    return submitter.submit(Submission(name, folder, (request,), (list(command),)))[0]


def requeue_own_job() -> bool:
    """Put the job that this process is back into the queue: its time is nearly up.

    False if it is none, or is on its way out for another reason (`scancel` sends SIGTERM, too).
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        return False
    state = _ask("squeue", "--noheader", "--format=%T", f"--jobs={job}")
    return state == "RUNNING" and _ask("scontrol", "requeue", job) is not None


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
