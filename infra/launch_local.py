"""Submits one local job from a session of its own, notes it down, and ends.

In: one JSON argument (what :class:`infra.jobs.local.LocalDispatcher` orders). Out: a running
submitit job, and ``job.json`` with its id and process. It runs as a process of its own so that the
job belongs to neither the terminal nor the process group of whoever ordered it, and so that the job
is noted down even if the orchestrator is killed in between.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import submitit

from infra.host.processes import ProcessId
from infra.jobs.niceness import give_way
from infra.store.atomic import write_json


def main() -> None:
    """Submit the job that the argument describes."""
    order = json.loads(sys.argv[1])
    if nice := order["nice"]:
        give_way(nice)
    executor = submitit.LocalExecutor(folder=order["folder"])
    executor.update_parameters(**order["parameters"])
    # `verbose=False`: the worker keeps its own log, and submitit would hold all of it in memory.
    job = executor.submit(submitit.helpers.CommandFunction(order["command"], verbose=False))
    process = ProcessId.of(int(job.job_id))
    note = {"job_id": job.job_id, "executor": "local", "comment": order["comment"]}
    write_json(Path(order["job_file"]), {**note, "process": str(process)})


if __name__ == "__main__":
    main()
