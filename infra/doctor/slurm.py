"""Area ``slurm``: commands, controller, accounting, and sbatch's verdict on the stages.

In: Slurm's commands on PATH, the recipe's profile and stages. Out: findings. Nothing is submitted
(``sbatch --test-only``); `srun refiner doctor` checks a compute node.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence

from infra.doctor.check import (
    CheckResult,
    DoctorCheck,
    ProgramOutput,
    SystemInfo,
    absent,
    ask,
    fine,
    found,
    scratch_in,
)
from infra.jobs.dispatcher import JobRequest
from infra.slurm.submission import Submission, Submitter
from refiner_core.contract.config import Resources
from refiner_core.contract.errors import RefinerError

#: Limit for a command of Slurm, seconds. `scontrol` itself retries for much longer.
SLURM_S = 8.0
_LINE = re.compile(r"^\s*(?P<name>[A-Za-z]\w*)\s*=\s*(?P<value>.*?)\s*$")
_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
_AGAIN, _ACCOUNTS_AGAIN = "sudo systemctl restart slurmctld", "sudo systemctl restart slurmdbd"


def _asked() -> tuple[dict[str, str], ProgramOutput]:
    """The controller's present settings by name, and its answer."""
    answer = ask(["scontrol", "show", "config"], SLURM_S)
    lines = (_LINE.match(line) for line in answer.out.splitlines())
    found = {m["name"]: m["value"] for m in lines if m}
    return {name: value for name, value in found.items() if value not in ("(null)", "N/A")}, answer


def _there() -> bool:
    return all(shutil.which(c) for c in _COMMANDS)


def _commands(info: SystemInfo) -> CheckResult:
    if lacking := [c for c in _COMMANDS if shutil.which(c) is None]:
        fix = f"{info.command('run')} dispatch.executor=local" if info.on_slurm else ""
        what = f"no {', '.join(lacking)} on PATH"
        return found(absent(info.on_slurm), what, fix, "dispatch.executor=slurm")
    version = ask(["sbatch", "--version"], SLURM_S)
    less = [c for c in ("sacct", "sinfo") if shutil.which(c) is None]
    without = f"; without {', '.join(less)}" if less else ""
    return fine(f"{version.out.strip() or 'they are on PATH'}{without}")


def _controller(info: SystemInfo) -> CheckResult | None:
    if not _there():
        return None
    settings, answer = _asked()
    if settings:
        cluster, version = settings.get("ClusterName"), settings.get("SLURM_VERSION")
        return fine(f"cluster {cluster} answers, Slurm {version}")
    said = answer.last_line
    fix = "export SLURM_CONF=/PATH/TO/slurm.conf" if "configuration source" in said else _AGAIN
    why = "starting jobs; running ones continue meanwhile"
    return found(absent(info.on_slurm), f"it gives no answer ({said})", fix, why)


def _accounting(info: SystemInfo) -> CheckResult | None:
    if not _there() or not (settings := _asked()[0]):
        return None
    kind, age = settings.get("AccountingStorageType"), settings.get("MinJobAge")
    if not kind or kind.endswith("/none"):
        return found(
            "missing",
            f"it is off: the ends of jobs come from the controller, which forgets after {age}",
            "AccountingStorageType=accounting_storage/slurmdbd",
            "without it, a job that ended unobserved counts as killed",
        )
    answer = ask(["sacct", "--noheader", "--allocations", "--starttime=now-1hour"], SLURM_S)
    if answer.ok:
        return fine(f"{kind} answers")
    what, why = f"{kind} gives no answer: {answer.last_line}", "the controller's memory"
    return found("warning", what, _ACCOUNTS_AGAIN, f"runs continue with {why}")


# ---------------------------------------------------------------- sbatch's verdict


def _test_only(info: SystemInfo) -> Iterator[CheckResult]:
    if not info.on_slurm or not _there() or not _asked()[0]:
        return
    shapes: dict[Resources, list[str]] = {}
    for stage in info.stages:
        if info.profile.executor_for(stage) == "slurm":
            shapes.setdefault(stage.resources, []).append(stage.name)
    if not shapes:
        shapes[Resources(time_limit_min=1, memory_gb=1)] = ["a tiny job"]
    for resources, names in shapes.items():
        yield _one_shape(info, resources, names)


def _one_shape(info: SystemInfo, resources: Resources, names: Sequence[str]) -> CheckResult:
    name, profile = f"job of {', '.join(names)}", info.profile
    kind = next((s.kind for s in info.stages if s.name == names[0]), "")
    request = JobRequest(names[0], 1, "doctor", resources, kind=kind)
    try:
        profile.check(resources, names[0])
        with scratch_in(info.workspace) as folder:
            work = Submission("refiner-doctor", folder, (request,), (["true"],))
            said = Submitter(profile, "python3").test_only(work, SLURM_S)
    except RefinerError as error:
        nodes = 'sinfo --format="%P %a %l %D nodes, %c cores, %m MB, %G, %f"'
        fix = error.fix if error.fix.startswith("scontrol") else nodes
        why = f"requested by profile {profile.name!r}; `refiner plan` shows the resources"
        return found("broken", error.what, fix, why, name=name)
    return fine(f"sbatch would accept it: {said}", name=name)


CHECKS = (
    DoctorCheck("slurm", "commands", _commands, needed=lambda x: x.on_slurm, hung=_AGAIN),
    DoctorCheck("slurm", "controller", _controller, needed=lambda x: x.on_slurm, hung=_AGAIN),
    DoctorCheck("slurm", "accounting", _accounting, hung=_ACCOUNTS_AGAIN),
    DoctorCheck("slurm", "jobs of the recipe", _test_only, 60, lambda x: x.on_slurm, _AGAIN),
)
