"""One call of a fake Slurm command; see the package's docstring."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

_PART = "\x1f"


def main(command: str, arguments: list[str]) -> int:
    """Note the call and answer it from the folder."""
    folder = Path(os.environ["FAKE_SLURM"])
    with (folder / "calls.jsonl").open("a") as log:
        call = {"command": command, "arguments": arguments, "environment": sorted(os.environ)}
        log.write(json.dumps(call) + "\n")
    fails = folder / f"{command}.fails"
    if fails.exists():
        print(fails.read_text(), file=sys.stderr)
        return 1
    jobs = json.loads((folder / "jobs.json").read_text())
    if command == "sbatch":
        return _sbatch(folder, jobs, Path(arguments[-1]))
    if command == "squeue":
        for number, job in jobs.items():
            if job.get("live", True):
                row = (number, job["state"], job.get("reason", "None"), job.get("node", ""))
                print(_PART.join((*row, _user(job), job.get("name", ""))))
    if command == "scontrol" and "show" in arguments:
        return _show(jobs, arguments[-1])
    if command == "sacct":
        _sacct(jobs)
    if command == "scancel":
        jobs.pop(arguments[-1], None)
        (folder / "jobs.json").write_text(json.dumps(jobs))
    return 0


def _sbatch(folder: Path, jobs: dict[str, dict[str, object]], script: Path) -> int:
    number = 1 + max((int(i.partition("_")[0]) for i in jobs), default=100)
    text = script.read_text()
    (folder / f"{number}.sh").write_text(text)
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH")
    )
    job = {"state": "PENDING", "reason": "Priority", "name": options["job-name"]}
    if "array" in options:
        last = int(options["array"].partition("%")[0].partition("-")[2])
        jobs |= {f"{number}_{task}": job for task in range(last + 1)}
    else:
        jobs[str(number)] = job
    (folder / "jobs.json").write_text(json.dumps(jobs))
    print(f"Submitted batch job {number}")
    return 0


def _show(jobs: dict[str, dict[str, object]], asked: str) -> int:
    known = {i: j for i, j in jobs.items() if j.get("remembered", True)}
    if asked != "job":
        known = {i: j for i, j in known.items() if i == asked}
        if not known:
            print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
            return 1
    for number, job in known.items():
        array, _, task = number.partition("_")
        place = f"ArrayJobId={array} ArrayTaskId={task} " if task else ""
        print(
            f"JobId={array} {place}JobName={job.get('name', '')} UserId=x({_user(job)}) "
            f"JobState={job['state']} "
            f"Reason={job.get('reason', 'None')} Restarts={job.get('restarts', 0)} "
            f"ExitCode={job.get('exit_code', '0:0')} PreemptTime={job.get('preempted', 'None')} "
            f"NodeList={job.get('node', '(null)')} BatchHost=x"
        )
    return 0


def _user(job: dict[str, object]) -> str:
    return str(job.get("user", os.getuid()))


def _sacct(jobs: dict[str, dict[str, object]]) -> None:
    for number, job in jobs.items():
        node = job.get("node", "None assigned")
        rest = (job.get("exit_code", "0:0"), "None", node, _user(job))
        if job.get("recorded", True):
            print(_PART.join(map(str, (number, job["state"], *rest, job.get("name", "")))))
            for step, state in dict(job.get("steps", {})).items():  # type: ignore[call-overload]
                print(_PART.join(map(str, (f"{number}.{step}", state, *rest, step))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
