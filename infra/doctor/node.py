"""Checks on a compute node: one tiny job, with the profile and code snapshot of stages.

In: a :class:`~infra.doctor.check.SystemInfo` of the submitting machine. Out: findings of area
``node``, made there by this module's own :func:`main` and read back through the workspace. The job
runs like a worker: the profile's interpreter on a code snapshot, in the profile's setup. Its folder
below the workspace is removed at the end, and a job that has not started by then is cancelled.
    python -m infra.doctor.node --workspace FOLDER GPUS 1      # by the job
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from infra.doctor import gpu, machine, services
from infra.doctor.check import (
    CheckResult,
    DoctorCheck,
    SystemInfo,
    ask,
    fine,
    found,
    run_checks,
    scratch_in,
)
from infra.doctor.slurm import SLURM_S
from infra.jobs.dispatcher import JobRequest, WorkerCommand
from infra.slurm.submission import Submission, Submitter
from infra.store import atomic
from infra.store.provenance import snapshot_code
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig, Resources
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.records import from_json, to_json

_REPORT, _LOOK = "node.json", "look.json"
_NODE_S = 60.0
_WHY = "stages run there"


def node_check(wait_s: float) -> DoctorCheck:
    """The check that submits a job and waits for it, at most ``wait_s`` seconds."""
    return DoctorCheck(
        *("node", "job", lambda info: _visit(info, wait_s)),
        limit_s=wait_s + 60,
        needed=lambda info: info.on_slurm,
        hung="squeue --me",
    )


def _visit(info: SystemInfo, wait_s: float) -> Iterator[CheckResult]:
    with scratch_in(info.workspace) as folder:
        atomic.write_json(folder / _LOOK, {"config": to_json(info.config), "recipe": info.recipe})
        gpus = min(1, info.most_gpus)
        began, name = time.time(), f"refiner-doctor-{folder.name[-8:]}"

        def leave_nothing() -> None:
            ask(["scancel", "--quiet", f"--name={name}"], SLURM_S)
            shutil.rmtree(folder, ignore_errors=True)

        atexit.register(leave_nothing)  # for Ctrl-C, which threads do not receive
        try:
            job = _submit(info, folder, name, gpus)
            said = _wait(info, folder, job, began + wait_s)
        except RefinerError as error:
            yield found("broken", error.what, "sinfo --long", _WHY)
            return
        finally:
            atexit.unregister(leave_nothing)
            leave_nothing()
        if isinstance(said, CheckResult):
            yield said
        else:
            yield from _told(said, time.time() - began)


def _submit(info: SystemInfo, folder: Path, name: str, gpus: int) -> str:
    """Submit a job of one core, a minute or two, and a GPU if the recipe has stages with GPUs."""
    code = snapshot_code(Workspace.open(folder / "workspace"))
    resources = Resources(gpus=gpus, cpus=1, memory_gb=2 if gpus else 1, time_limit_min=3)
    request = JobRequest(str(gpus), 1, name, resources, code=code, needs_network=True)
    python = info.profile.python or sys.executable
    worker = WorkerCommand(folder, ("-m", "infra.doctor.node"), python)
    command = worker.arguments(request, offline=not info.profile.network)
    (folder / "submitit").mkdir()
    work = Submission(name, folder / "submitit", (request,), (command,))
    return Submitter(info.profile, python).submit(work)[0]


def _wait(info: SystemInfo, folder: Path, job: str, until: float) -> dict[str, Any] | CheckResult:
    """The job's report, or a finding if there is none."""
    over = 0
    while time.time() < until:
        if (said := atomic.read_json(folder / _REPORT)) is not None:
            return dict(said)
        state = _state(job)
        over = over + 1 if state == "" else 0
        if over > 2:  # files may appear a little later than the end of a job
            logs = sorted(folder.glob("submitit/*.err"))
            lines = "".join(path.read_text(errors="replace") for path in logs).strip().splitlines()
            last = lines[-1][:300] if lines else "its log is empty, or not visible from here"
            what = f"job {job} ended without a report: {last}"
            return found("broken", what, f"scontrol show job {job}", _WHY)
        time.sleep(0.5)
    what = f"job {job} has not started: {_state(job) or 'it is gone'}"
    why = "it was cancelled; the state of a compute node is unknown"
    return found("warning", what, info.again("--job --wait 600"), why)


def _state(job: str) -> str | None:
    """State and reason; empty if the queue does not have it, None if unknown."""
    answer = ask(["squeue", "--noheader", f"--jobs={job}", "--format=%T %r"], SLURM_S)
    return None if answer.hung or answer.code is None else answer.out.strip()


def _told(said: dict[str, Any], seconds: float) -> Iterator[CheckResult]:
    node = str(said["node"])
    yield fine(
        f"{node} sees the workspace; Python {said['python']} imports refiner from a code "
        f"snapshot; {seconds:.1f} s from sbatch to its report"
    )
    for value in said["findings"]:
        one = CheckResult(**value)
        yield replace(one, area="node", name=f"{one.area}: {one.name}")


# ---------------------------------------------------------------- on the node


def main(argv: list[str] | None = None) -> int:
    """Run the checks on the node; called by the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("gpus", type=int)
    parser.add_argument("attempt")
    given = parser.parse_args(argv)
    noted = json.loads((given.workspace / _LOOK).read_text())
    config = from_json(RecipeConfig, noted["config"])
    info = SystemInfo(config=config, recipe=noted["recipe"], on_node=True, asked_gpus=given.gpus)
    names = ("cores", "memory", "memory as a folder", "file system")
    checks = [check for check in machine.CHECKS if check.name in names]
    checks += [*services.NETWORK, *gpu.SERVING, *(gpu.GPUS if given.gpus else ())]
    value = {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "python": sys.version.split()[0],
        "findings": [asdict(f) for f in run_checks(checks, info, limit_s=_NODE_S)],
    }
    atomic.write_json(given.workspace / _REPORT, value)
    return 0


if __name__ == "__main__":
    sys.exit(main())
