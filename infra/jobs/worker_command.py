"""What a job runs: an argument list, never a pickled closure.

In: a :class:`~infra.jobs.protocol.JobRequest`. Out: ``env … python -P -m flows.worker --workspace
W STAGE ATTEMPT`` with the settings that it needs. Settings travel in the command, where they can
be seen; secrets only in the environment that a job inherits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.jobs.protocol import JobRequest
from infra.store.ownership import SHARED

#: Settings of a job that must not look for the internet.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True)
class WorkerCommand:
    """How workers are called.

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
    return "\n".join(_tail(f, size) for f in files)


def _tail(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
