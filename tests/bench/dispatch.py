"""Dispatch beside bare submitit on a private real Slurm: `python -m tests.bench.dispatch`.

One JSON line each, with the goal and whether it was met:

- 200 no-op jobs as one array: wall time beside bare submitit's, and our CPU time per job
  (this process and the commands that it calls);
- 1,000 live jobs looked at every half second: queries per ten seconds, and share of a core.
"""

from __future__ import annotations

import json
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import submitit

from infra.jobs.dispatcher import AttemptRef, JobRequest, OpenAttempt, WorkerCommand
from infra.slurm.dispatcher import SlurmDispatcher
from infra.slurm.profiles import Profile
from infra.slurm.scheduler import RealSlurm
from infra.store.workspace import Workspace
from refiner_core.contract.config import Resources
from refiner_core.contract.records import Attempt
from tests.bench.__main__ import machine
from tests.support.slurm_cluster import Cluster, ClusterSpec, missing, running_cluster

JOBS, LIVE, ROUNDS, LOOK_S = 200, 1000, 3, 30.0
PROFILE = Profile(name="bench", cpu_stages="slurm", array_limit=JOBS)
RESOURCES = Resources(cpus=1, memory_gb=1, time_limit_min=10)


def main() -> int:
    """Run both; 0 even where a goal is missed: the lines say so."""
    spec = ClusterSpec(nodes=4, gpus=0)
    if reason := missing(spec):
        print(f"no Slurm of our own: {reason}", file=sys.stderr)
        return 2
    with running_cluster(spec) as cluster, cluster.joined():
        for line in (*no_op_jobs(), *live_jobs(cluster)):
            print(json.dumps({**line, "machine": machine()}), flush=True)
    return 0


def no_op_jobs() -> Iterator[dict[str, Any]]:
    """Rounds of ours and bare submitit in turn."""
    walls: dict[str, list[float]] = {"ours": [], "rival": []}
    cpu: dict[str, list[float]] = {"ours": [], "rival": []}
    for _ in range(ROUNDS):
        for side, call in (("ours", _ours), ("rival", _bare)):
            with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                run = call(Path(folder))
                begun, used = time.monotonic(), _cpu_s()
                run()
                walls[side].append(time.monotonic() - begun)
                cpu[side].append((_cpu_s() - used) / JOBS * 1000)
    wall = {side: statistics.median(found) for side, found in walls.items()}
    ratio = wall["ours"] / wall["rival"]
    yield {
        "name": f"{JOBS} no-op jobs as an array, wall",
        "ours": round(wall["ours"], 1),
        "rival": round(wall["rival"], 1),
        "ratio": round(ratio, 2),
        "unit": "s, lower is better",
        "rounds": ROUNDS,
        "goal": "ratio <= 1.2",
        "met": ratio <= 1.2,
    }
    spent = {side: statistics.median(found) for side, found in cpu.items()}
    yield {
        "name": f"{JOBS} no-op jobs as an array, CPU per job",
        "ours": round(spent["ours"], 1),
        "rival": round(spent["rival"], 1),
        "unit": "ms, this process and the commands it calls",
        "rounds": ROUNDS,
        "goal": "ours <= 50",
        "met": spent["ours"] <= 50,
    }


def live_jobs(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Held jobs of the real controller, looked at as a campaign does."""
    array = cluster.run(
        *("sbatch", "--parsable", "--hold", f"--array=0-{LIVE - 1}", "--output=/dev/null"),
        "--wrap=true",
    ).strip()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        workspace, asked = Workspace.open(Path(folder)), Counting()
        dispatcher = SlurmDispatcher(workspace, PROFILE, commands=asked)
        jobs = [_known(f"{array}_{n}") for n in range(LIVE)]
        begun, used, looks = time.monotonic(), _cpu_s(), 0
        while time.monotonic() - begun < LOOK_S:
            seen = dispatcher.look(jobs)
            looks += 1
            time.sleep(0.5)
        wall, spent = time.monotonic() - begun, _cpu_s() - used
    assert {s.liveness for s in seen.values()} == {"live"}
    assert len(seen) == LIVE
    cluster.run("scancel", array)
    queries, share = asked.count / wall * 10, spent / wall
    yield {
        "name": f"{LIVE} live jobs, {looks} looks, queries",
        "ours": round(queries, 2),
        "unit": f"per 10 s ({asked.count} in {wall:.0f} s)",
        # The first look asks at once, so a window holds one query more than it has intervals.
        "goal": "<= 1 per 10 s",
        "met": asked.count <= wall // 10 + 1,
    }
    yield {
        "name": f"{LIVE} live jobs, {looks} looks, CPU",
        "ours": round(share, 4),
        "unit": "share of a core",
        "goal": "< 0.05",
        "met": share < 0.05,
    }


class Counting(RealSlurm):
    """Counts queries."""

    count = 0

    def _run(
        self, *command: str, passing: re.Pattern[str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        self.count += 1
        return super()._run(*command, passing=passing)


def _ours(folder: Path) -> Callable[[], None]:
    workspace = Workspace.open(folder)
    worker = WorkerCommand(workspace.root, ("-c", "pass"))
    dispatcher = SlurmDispatcher(workspace, PROFILE, scheduler_poll_s=1.0, worker=worker)
    requests = [
        JobRequest(f"bench-{n:012x}", 1, f"refiner-bench-{n}", RESOURCES) for n in range(JOBS)
    ]
    for request in requests:
        workspace.layout.attempt(*request.ref).control.mkdir(parents=True)

    def run() -> None:
        assert dispatcher.submit(requests) == {}
        _until_over(dispatcher, [_noted(workspace, r) for r in requests])

    return run


def _bare(folder: Path) -> Callable[[], None]:
    executor = submitit.SlurmExecutor(folder=folder)
    executor.update_parameters(
        time=10, mem="1GB", cpus_per_task=1, array_parallelism=JOBS, job_name="bare"
    )
    task = submitit.helpers.CommandFunction([sys.executable, "-P", "-c", "pass"], verbose=False)

    def run() -> None:
        with executor.batch():
            jobs = [executor.submit(task) for _ in range(JOBS)]
        waiting = [job.paths.result_pickle for job in jobs]
        while waiting := [path for path in waiting if not path.exists()]:
            time.sleep(0.5)

    return run


def _until_over(dispatcher: SlurmDispatcher, jobs: Sequence[OpenAttempt]) -> None:
    while jobs:
        seen = dispatcher.look(jobs)
        assert not any(s.facts and s.facts["state"] != "COMPLETED" for s in seen.values())
        jobs = [j for j in jobs if seen[j.ref].liveness != "dead"]
        time.sleep(0.5)


def _noted(workspace: Workspace, request: JobRequest) -> OpenAttempt:
    note = workspace.read_control(workspace.layout.attempt(*request.ref).job)
    assert note is not None
    return _known(str(note["job_id"]), request.ref)


def _known(job_id: str, ref: AttemptRef | None = None) -> OpenAttempt:
    attempt = Attempt(1, "refiner-bench", "slurm", "elsewhere:1:1.00", "", job_id=job_id)
    return OpenAttempt(ref or AttemptRef(f"held-{job_id}", 1), attempt, {"process": "x:1:1.0"})


def _cpu_s() -> float:
    """CPU seconds of this process and of the commands that it has called."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


if __name__ == "__main__":
    sys.exit(main())
