"""Submission of jobs to Slurm through submitit; the orchestrator may be such a job.

In: a profile, requests, and the argument lists of their jobs. Out: job ids. The content of the
batch script is composed here; submitit writes it, calls sbatch and starts the argument list on the
node. Its pickles hold nothing but that list.

By default, submitit asks Slurm for SIGUSR2 ahead of the time limit, and ends the job at once when
it comes, while the worker saves. We ask for SIGTERM, which submitit passes on and the worker
handles.

Where login nodes kill long processes, the orchestrator is a job of one core on the profile's place
for CPU jobs, which Slurm may restart: all state is in the workspace, so the same command continues.
When its time is up it requeues itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.host.processes import environment, run_program
from infra.jobs.dispatcher import JobRequest
from infra.slurm.profiles import Profile
from infra.slurm.scheduler import RealSlurm, SlurmUnavailable
from infra.store import atomic
from refiner_core.contract.config import Resources
from refiner_core.contract.errors import ConfigurationError, LaunchError, RefinerError
from refiner_core.contract.placement import STAGES as TRAINING_STAGES
from refiner_core.contract.records import picked

_REFUSED = re.compile(
    r"invalid (?:partition|account|qos|feature|reservation|generic resource|constraint|node name"
    r"|option|wckey|trackable resource|job array specification)"
    r"|requested node configuration is not available|(?:unrecognized|unknown) option"
    r"|more processors requested than permitted|requested time limit is invalid"
    r"|requested partition configuration not available|memory specification|node count"
    r"|access/permission denied|user's group not permitted|not permitted to use",
    re.IGNORECASE,
)
_NO_SUCH_NODES = re.compile(r"requested node configuration is not available", re.IGNORECASE)
#: sbatch gave up waiting; the controller may have taken the job all the same.
_PERHAPS = re.compile(r"timed out|zero bytes were transmitted|unexpected message", re.IGNORECASE)
#: The controller was unreachable: there is certainly no job.
_AWAY = re.compile(
    r"unable to contact slurm controller|connection refused|connect failure|standby mode"
    r"|no route to host|network is unreachable|munge",
    re.IGNORECASE,
)
#: Settings of the job that `refiner` itself runs in, or of its user, that would change ours.
_NOT_PASSED_ON = re.compile(
    r"(?:SLURM|SRUN|SLURMD|SUBMITIT)_(?!CONF$)\w+"
    r"|SBATCH_(?:JOB_NAME|COMMENT|SIGNAL|ARRAY_INX|REQUEUE|NO_REQUEUE|OPEN_MODE|EXPORT|OUTPUT"
    r"|ERROR|WAIT|TIMELIMIT)"
)


class SubmissionUnknown(RefinerError, RuntimeError):
    """sbatch had no answer in time: only the job's name can show whether there is one."""

    resumable = True


@dataclass(frozen=True)
class Submission:
    """Jobs to submit together: one, or the tasks of an array.

    ``name`` is unique and finds them again; ``folder`` holds submitit's files.
    """

    name: str
    folder: Path
    requests: tuple[JobRequest, ...]
    commands: tuple[list[str], ...]


@dataclass(frozen=True)
class Submitter:
    """Submits for one profile.

    Parameters
    ----------
    profile
        The cluster.
    python
        Interpreter in jobs.
    """

    profile: Profile
    python: str

    def shape(self, request: JobRequest) -> str:
        """Requests of one shape can share an array."""
        online, all_nodes = request.needs_network, _on_all_nodes(request)
        return repr((request.resources, online, sorted(request.avoid), all_nodes))

    def submit(self, work: Submission) -> list[str]:
        """Submit and return the ids, in the order of the requests.

        Raises
        ------
        ConfigurationError
            Slurm will never accept such a job here.
        LaunchError
            Slurm did not accept it now.
        SubmissionUnknown
            Slurm did not answer.
        """
        try:
            return self._submit(work, avoid=True)
        except ConfigurationError as error:
            avoids = any(r.avoid for r in work.requests)
            if not (avoids and _NO_SUCH_NODES.search(error.what)):
                raise
        # All nodes are excluded: rather use nodes that failed before than none.
        return self._submit(work, avoid=False)

    def _submit(self, work: Submission, *, avoid: bool) -> list[str]:
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        tasks = [submitit.helpers.CommandFunction(c, verbose=False) for c in work.commands]
        try:
            with _own_environment():
                executor = self._executor(work, avoid=avoid)
                with executor.batch() if len(tasks) > 1 else contextlib.nullcontext():
                    jobs = [executor.submit(task) for task in tasks]
        except (FailedJobError, FailedSubmissionError) as error:  # with sbatch's output
            raise self._refusal(work, " ".join(str(error).split())) from error
        return [str(job.job_id) for job in jobs]

    def test_only(self, work: Submission, timeout_s: float) -> str:
        """Slurm's answer when and where such a job would start; nothing is submitted.

        Raises
        ------
        ConfigurationError
            Slurm will never accept such a job here.
        LaunchError
            Slurm would not accept it now, or gave no answer.
        """
        text = self._executor(work, avoid=True)._make_submission_file_text("true", "test-only")
        script = work.folder / "test-only.sh"
        script.write_text(text)
        try:
            passed = {k: v for k, v in environment().items() if not _NOT_PASSED_ON.fullmatch(k)}
            done = run_program(["sbatch", "--test-only", str(script)], timeout_s, passed)
        except subprocess.TimeoutExpired as error:
            raise LaunchError(
                f"sbatch gave no answer in {timeout_s:.0f} s",
                expected="a scheduler that takes jobs",
                fix="scontrol ping",
            ) from error
        said = " ".join((done.stderr + done.stdout).replace("sbatch: ", "").split())
        if done.returncode:
            raise self._refusal(work, said)
        return said

    def _refusal(self, work: Submission, said: str) -> RefinerError:
        """The error that sbatch's output indicates."""
        said = said or "it printed nothing"
        what = f"sbatch did not accept the job of {work.requests[0].stage_id}: {said}"
        kind: type[RefinerError] = LaunchError
        expected = "a scheduler that takes jobs"
        fix = "nothing: it is tried again; `sinfo` and `scontrol ping` show Slurm's state"
        if _REFUSED.search(said):
            kind = ConfigurationError
            expected = f"what profile {self.profile.name!r} asks for to exist on this cluster"
            fix = "correct the profile (`dispatch.profile`) or the stage's `resources`"
        elif _PERHAPS.search(said):
            kind, expected = SubmissionUnknown, "an answer that names the job"
            fix = "nothing: the queue is searched for the job before it is tried again"
        elif _AWAY.search(said):
            kind, expected = SlurmUnavailable, "a controller that answers"
        return kind(what, expected=expected, fix=fix)

    def _executor(self, work: Submission, *, avoid: bool) -> Any:
        import submitit

        # The launcher on the node: nothing in the working directory may shadow it.
        path = os.environ.get("PYTHONPATH", "")
        kept = [p for p in path.split(os.pathsep) if p and Path(p).is_absolute()]
        settings = ["PYTHONSAFEPATH=1", *([f"PYTHONPATH={os.pathsep.join(kept)}"] if path else [])]
        words = shlex.join(["env", *settings, self.python, "-P"])
        python = " ".join(filter(None, (self.profile.container.prefix, words)))
        executor = submitit.SlurmExecutor(folder=work.folder, max_num_timeout=0, python=python)
        executor.update_parameters(**self.parameters(work, avoid=avoid))
        return executor

    def parameters(self, work: Submission, *, avoid: bool = True) -> dict[str, Any]:
        """Parameters for submitit; see its `SlurmExecutor`."""
        profile, first = self.profile, work.requests[0]
        place, wanted = profile.place_for(first.resources), first.resources
        lead = profile.lead_s(wanted, max(r.save_s for r in work.requests))
        modules = [f"module load {shlex.quote(m)}" for m in profile.modules]
        exclude = dict.fromkeys((*place.exclude, *(first.avoid if avoid else ())))
        parameters: dict[str, Any] = {
            "job_name": work.name,
            "comment": work.name,
            "time": wanted.time_limit_min,
            "nodes": wanted.nodes,
            "ntasks_per_node": 1,
            "cpus_per_task": wanted.cpus,
            "mem": f"{wanted.memory_gb}GB",
            **picked(place, "partition", "account", "qos", "constraint", "nodelist"),
            "exclude": ",".join(exclude) or None,
            "setup": [*profile.setup, *modules] or None,
            "wckey": None,  # submitit's default is unknown to a site with such keys
            "array_parallelism": profile.array_limit,
            "srun_args": [*_tasks(first), f"--cpus-per-task={wanted.cpus}"],
        }
        more: dict[str, Any] = {"signal": f"TERM@{lead}"}
        if wanted.gpus:
            what = f"{profile.gpu_type}:{wanted.gpus}" if profile.gpu_type else str(wanted.gpus)
            more |= (
                {"gres": f"gpu:{what}"} if profile.gpu_option == "gres" else {"gpus_per_node": what}
            )
        more["requeue" if profile.requeue else "no_requeue"] = True
        if place.reservation:
            more["reservation"] = place.reservation
        for option, value in place.sbatch.items():
            # In submitit's spelling, so that one of the same name is replaced, not doubled.
            name = option.lstrip("-").replace("-", "_")
            if value is None or value is False:
                parameters[name] = None
                more.pop(name, None)
            else:
                more[name] = value
        known = {k: v for k, v in parameters.items() if v is not None or k == "wckey"}
        return {**known, "additional_parameters": more}


def write_missing_pickle(folder: Path, job_id: str, command: Sequence[str]) -> None:
    """Write the file that a job needs on its node, after a crash between sbatch and submitit's own
    write: the job waits a minute for it."""
    target = folder / f"{job_id}_submitted.pkl"
    if target.exists():
        return
    import submitit

    task = submitit.helpers.CommandFunction(list(command), verbose=False)
    temporary = atomic.temporary_name(target)
    submitit.helpers.DelayedSubmission(task).dump(temporary)
    temporary.replace(target)


def _tasks(request: JobRequest) -> list[str]:
    """Arguments that start the step of a job. Since 22.05 it does not inherit `--cpus-per-task`.

    One worker per attempt, on the first node. For a training stage on several nodes, the same
    command on the others waits for the worker (:mod:`infra.ranks.launch`). An `srun` inside a step
    could start nothing there, because Slurm sends a request to stop to every process of a step, and
    `srun` answers by killing its processes. A node ends soon after another's failure or the
    worker's end.
    """
    if not _on_all_nodes(request):
        return ["--overlap", "--nodes=1", "--ntasks=1"]
    nodes = request.resources.nodes
    return [
        *("--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *("--kill-on-bad-exit=1", "--wait=60"),
    ]


def _on_all_nodes(request: JobRequest) -> bool:
    return request.resources.nodes > 1 and request.kind in TRAINING_STAGES


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Hide the settings of a job that this process runs in: sbatch and srun obey them."""
    hidden = {k: v for k, v in environment().items() if _NOT_PASSED_ON.fullmatch(k)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


#: Default if the profile has no limit of the partition. Most clusters refuse longer ones.
_TIME_MIN = 24 * 60
_MEMORY_GB = 2
_ASK_TIMEOUT_S = 30.0


def submit_orchestrator(
    command: Sequence[str], profile: Profile, folder: Path, *, name: str = "refiner"
) -> str:
    """Submit a job that runs ``command``, and return its id.

    Raises
    ------
    UnsupportedError
        Slurm is not installed.
    ConfigurationError
        Slurm refuses the profile's options.
    LaunchError
        Slurm did not accept the job now.
    """
    RealSlurm()  # raises if its commands are missing
    folder.mkdir(parents=True, exist_ok=True)
    resources = Resources(cpus=1, memory_gb=_MEMORY_GB, time_limit_min=_TIME_MIN)
    limit = profile.place_for(resources).max_time_min
    resources = replace(resources, time_limit_min=limit or _TIME_MIN)
    request = JobRequest("orchestrator", 1, name, resources)
    # Its children must end with it, not keep its job open; and it must restart by itself.
    submitter = Submitter(replace(profile, requeue=True), profile.python or sys.executable)
    return submitter.submit(Submission(name, folder, (request,), (list(command),)))[0]


def requeue_own_job() -> bool:
    """Requeue the job that this process is: its time is nearly up.

    False if there is none, or it is ending for another reason (`scancel` sends SIGTERM, too).
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        return False
    state = _ask("squeue", "--noheader", "--format=%T", f"--jobs={job}")
    return state == "RUNNING" and _ask("scontrol", "requeue", job) is not None


def _ask(*command: str) -> str | None:
    try:
        done = run_program(command, _ASK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
