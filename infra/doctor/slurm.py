"""Area ``slurm``: commands, controller, accounting, what the profile names, what sbatch would say.

In: Slurm's commands on PATH, the recipe's profile and stages. Out: findings. Nothing is submitted
here (``sbatch --test-only``); :mod:`infra.doctor.node` does that, when it is asked to.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from infra.doctor.check import Answer, Check, Finding, Look, absent, ask, doubtful, scratch_in
from infra.host.processes import user_name
from infra.jobs.protocol import JobRequest
from infra.slurm.profiles import Place
from infra.slurm.submission import Submission, Submitter
from refiner_core.contract.config import Resources
from refiner_core.contract.errors import RefinerError

#: How long a command of Slurm may take. `scontrol` itself tries for much longer.
SLURM_S = 8.0
_LINE = re.compile(r"^\s*(?P<name>[A-Za-z]\w*)\s*=\s*(?P<value>.*?)\s*$")
_AT = re.compile(r"Configuration data as of (\S+)")


@dataclass(frozen=True)
class SlurmSettings:
    """``values`` by name as `scontrol show config` prints them; ``at`` the controller's clock,
    seconds since 1970; ``answer`` what it said where it gave none."""

    values: Mapping[str, str]
    at: float | None
    answer: Answer

    def get(self, name: str) -> str:
        """A value; empty where it is not set."""
        value = self.values.get(name, "")
        return "" if value in ("(null)", "N/A") else value


def slurm_settings(look: Look) -> SlurmSettings:
    """The controller's settings, asked by whoever needs them first."""
    with look.one:
        if "slurm" not in look.kept:
            look.kept["slurm"] = _ask_controller()
        settings: SlurmSettings = look.kept["slurm"]
        return settings


def _ask_controller() -> SlurmSettings:
    answer = ask(["scontrol", "show", "config"], SLURM_S)
    found = (_LINE.match(line) for line in answer.out.splitlines())
    values = {m["name"]: m["value"] for m in found if m}
    stamp = _AT.search(answer.out)
    at = None
    if stamp is not None:
        try:
            at = datetime.fromisoformat(stamp[1]).astimezone().timestamp()
        except ValueError:
            at = None  # another version's way of writing times
    return SlurmSettings(values, at, answer)


_AREA = "slurm"
_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
_WHY = "dispatch.executor=slurm"
_AGAIN, _ACCOUNTS_AGAIN = "sudo systemctl restart slurmctld", "sudo systemctl restart slurmdbd"


def _there() -> bool:
    return all(shutil.which(c) for c in _COMMANDS)


def _answering(look: Look) -> bool:
    return _there() and bool(slurm_settings(look).values)


def _commands(look: Look) -> Iterator[Finding]:
    lacking = [c for c in _COMMANDS if shutil.which(c) is None]
    if lacking:
        yield Finding(
            *(_AREA, "commands", absent(look.on_slurm), f"no {', '.join(lacking)} on PATH"),
            mend=f"{look.command('run')} dispatch.executor=local" if look.on_slurm else "",
            why=_WHY,
        )
        return
    version = ask(["sbatch", "--version"], SLURM_S)
    less = [c for c in ("sacct", "sinfo") if shutil.which(c) is None]
    without = f"; without {', '.join(less)}" if less else ""
    said = version.out.strip() or "they are on PATH"
    yield Finding(_AREA, "commands", "ok", f"{said}{without}")


def _controller(look: Look) -> Iterator[Finding]:
    if not _there():
        return
    settings = slurm_settings(look)
    if not settings.values:
        answer = settings.answer
        yield Finding(
            *(_AREA, "controller", absent(look.on_slurm)),
            f"it gives no answer ({answer.last_line})",
            mend="export SLURM_CONF=/PATH/TO/slurm.conf"
            if "configuration source" in answer.last_line
            else _AGAIN,
            why="starting jobs; those that run go on meanwhile",
        )
        return
    host = settings.get("ClusterName")
    yield Finding(
        *(_AREA, "controller", "ok"),
        f"cluster {host} answers, Slurm {settings.get('SLURM_VERSION')}",
    )
    yield from _nodes(look)


def _nodes(look: Look) -> Iterator[Finding]:
    answer = ask(["sinfo", "--noheader", "--format=%D %t"], SLURM_S)
    if not answer.ok:
        yield Finding(
            *(_AREA, "nodes", doubtful(look.on_slurm), f"`sinfo`: {answer.last_line}"), mend=_AGAIN
        )
        return
    pairs = [line.split() for line in answer.out.splitlines() if len(line.split()) == 2]
    away = ("down", "drain", "drng", "fail", "unk", "maint", "boot", "inval")
    up = sum(int(n) for n, state in pairs if not state.startswith(away) and state[-1] != "*")
    what = ", ".join(f"{n} {state}" for n, state in pairs)
    if up:
        yield Finding(_AREA, "nodes", "ok", what)
    else:
        yield Finding(
            *(_AREA, "nodes", doubtful(look.on_slurm), f"none can take a job: {what or 'none'}"),
            mend="sinfo --list-reasons",
        )


def _accounting(look: Look) -> Iterator[Finding]:
    if not _answering(look):
        return
    settings = slurm_settings(look)
    kind, age = settings.get("AccountingStorageType"), settings.get("MinJobAge")
    if not kind or kind.endswith("/none"):
        yield Finding(
            *(_AREA, "accounting", "missing"),
            f"it is off: how jobs ended is asked of the controller, which forgets after {age}",
            mend="AccountingStorageType=accounting_storage/slurmdbd",
            why="a line of slurm.conf, for who runs the cluster: without it, a job that ended "
            "while nobody looked counts as killed",
        )
        return
    answer = ask(["sacct", "--noheader", "--allocations", "--starttime=now-1hour"], SLURM_S)
    if answer.ok:
        yield Finding(_AREA, "accounting", "ok", f"{kind} answers")
    else:
        yield Finding(
            *(_AREA, "accounting", "warning", f"{kind} gives no answer: {answer.last_line}"),
            mend=_ACCOUNTS_AGAIN,
            why="runs go on by what the controller remembers",
        )


def _settings(look: Look) -> Iterator[Finding]:
    if not _answering(look):
        return
    settings = slurm_settings(look)
    plugins, limited = settings.get("TaskPlugin"), settings.get("ConstrainRAMSpace")
    if "cgroup" in plugins and limited.lower() in ("yes", ""):
        yield Finding(_AREA, "memory of jobs", "ok", f"enforced by {plugins}")
    else:
        yield Finding(
            *(_AREA, "memory of jobs", "missing"),
            f"not enforced (TaskPlugin={plugins or 'none'}): a job that takes too much takes it "
            "from others on its node",
            mend="TaskPlugin=task/cgroup,task/affinity",
            why="a line of slurm.conf, with ConstrainRAMSpace=yes in cgroup.conf",
        )
    preempt = settings.get("PreemptMode") or "OFF"
    again = "on" if settings.get("JobRequeue") == "1" else "off, and refiner asks for it job by job"
    yield Finding(
        _AREA, "requeue", "ok", f"preemption {preempt}; starting jobs again is {again} by default"
    )
    most = settings.get("MaxArraySize")
    if most.isdigit() and look.profile.array_size >= int(most):
        yield Finding(
            *(_AREA, "arrays", "warning"),
            f"MaxArraySize={most}, and profile {look.profile.name!r} has array_size "
            f"{look.profile.array_size}",
            mend=f"array_size: {int(most) - 1}",
            why=_line_of(look),
        )


# ---------------------------------------------------------------- what the profile names


def _profile(look: Look) -> Iterator[Finding]:
    profile = look.profile  # refuses one that cannot be read
    if not _answering(look) or not (look.on_slurm or look.config.dispatch.profile):
        return
    needed, wrong = look.on_slurm, False
    for place in (profile, profile.cpu):
        for finding in _named(look, place, needed):
            wrong = True
            yield finding
    if not wrong:
        nodes = "reach the internet" if profile.network else "do not reach the internet"
        what = f"{profile.name}: what it names exists; compute nodes, it says, {nodes}"
        yield Finding(_AREA, "profile", "ok", what)


def _named(look: Look, place: Place, needed: bool) -> Iterator[Finding]:
    """Partitions, accounts and QOS that are not there."""
    name = look.profile.name
    words = _words("sinfo", "--noheader", "--all", "--format=%P")
    there = None if words is None else {w.rstrip("*") for w in words}
    for wanted in (place.partition or "").split(","):
        if wanted and there is not None and wanted not in there:
            yield Finding(
                *(_AREA, "profile", doubtful(needed)),
                f"profile {name!r} names partition {wanted!r}; there are "
                f"{', '.join(sorted(there))}",
                mend=f"partition: {_default(words or []) or 'NAME'}",
                why=_line_of(look),
            )
    if slurm_settings(look).get("AccountingStorageType").endswith("/none"):
        return
    me = user_name()
    asked = ("sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={me}")
    for field, value in (("account", place.account), ("qos", place.qos)):
        found = _words(*asked, f"format={field}") if value else None
        mine = {one for text in found or () for one in text.split(",") if one}
        if value and mine and value not in mine:
            yield Finding(
                *(_AREA, "profile", doubtful(needed)),
                f"profile {name!r} names {field} {value!r}; you have {', '.join(sorted(mine))}",
                mend=f"{field}: {sorted(mine)[0]}",
                why=_line_of(look),
            )


def _line_of(look: Look) -> str:
    return f"a line of {look.config.dispatch.profile or 'a profile of your own'}"


def _words(*command: str) -> list[str] | None:
    answer = ask(command, SLURM_S)
    return answer.out.split() if answer.ok else None


def _default(partitions: Sequence[str]) -> str:
    """The default partition, which `sinfo` marks; else the first."""
    marked = [name for name in partitions if name.endswith("*")]
    return (marked or [*partitions, ""])[0].rstrip("*")


# ---------------------------------------------------------------- what sbatch would say


def _test_only(look: Look) -> Iterator[Finding]:
    if not _answering(look) or not look.on_slurm:
        return
    submitter = Submitter(look.profile, "python3")
    stages = [s for s in look.stages if look.profile.executor_for(s) == "slurm"]
    shapes: dict[Resources, list[str]] = {}
    for stage in stages:
        shapes.setdefault(stage.resources, []).append(stage.name)
    if not shapes:
        shapes[Resources(time_limit_min=1, memory_gb=1)] = ["a tiny job"]
    with scratch_in(look.workspace) as folder:
        for resources, names in shapes.items():
            yield _one_shape(look, submitter, folder, resources, names)


def _one_shape(
    look: Look, submitter: Submitter, folder: Path, resources: Resources, names: Sequence[str]
) -> Finding:
    name = f"job of {', '.join(names)}"
    kind = next((s.kind for s in look.stages if s.name == names[0]), "")
    request = JobRequest(names[0], 1, "doctor", resources, kind=kind)
    try:
        look.profile.check(resources, names[0])
        work = Submission("refiner-doctor", folder, (request,), (["true"],))
        said = submitter.test_only(work, SLURM_S)
    except RefinerError as error:
        return Finding(
            *(_AREA, name, "broken", error.what),
            mend=error.fix
            if error.fix.startswith("scontrol")
            else _less(look, names[0], resources),
            why=f"{resources.gpus} GPUs, {resources.cpus} cores, {resources.memory_gb} GiB, "
            f"{resources.nodes} nodes, {resources.time_limit_min} min are asked for by profile "
            f"{look.profile.name!r}",
        )
    return Finding(_AREA, name, "ok", f"sbatch would take it: {said}")


def _less(look: Look, stage: str, asked: Resources) -> str:
    """The same question with what the largest node has, where more was asked for."""
    kind = next((s.kind for s in look.stages if s.name == stage), "")
    section = {"evaluate": "evaluate", "export": "publish", "card": "publish"}.get(kind, kind)
    words = _words("sinfo", "--noheader", "--exact", "--format=%c %m") or []
    numbers = [int(word.rstrip("+")) for word in words if word.rstrip("+").isdigit()]
    most = Resources(
        cpus=max(numbers[::2], default=0), memory_gb=max(numbers[1::2], default=0) >> 10
    )
    less = {n: v for n in ("cpus", "memory_gb") if 0 < (v := getattr(most, n)) < getattr(asked, n)}
    if not (less and look.recipe and hasattr(getattr(look.config, section, None), "resources")):
        return 'sinfo --format="%P %a %l %D nodes, %c cores, %m MB, %G, %f"'
    return " ".join([look.again(), *(f"{section}.resources.{n}={v}" for n, v in less.items())])


CHECKS = (
    Check(_AREA, "commands", _commands, needed=lambda x: x.on_slurm, hung=_AGAIN),
    Check(_AREA, "controller", _controller, needed=lambda x: x.on_slurm, hung=_AGAIN),
    Check(_AREA, "accounting", _accounting, hung=_ACCOUNTS_AGAIN),
    Check(_AREA, "settings", _settings, hung=_AGAIN),
    Check(
        *(_AREA, "profile", _profile),
        limit_s=30,
        needed=lambda x: x.on_slurm or x.config.dispatch.profile,
        hung=_AGAIN,
    ),
    Check(
        *(_AREA, "jobs of the recipe", _test_only),
        limit_s=60,
        needed=lambda x: x.on_slurm,
        hung=_AGAIN,
    ),
)
