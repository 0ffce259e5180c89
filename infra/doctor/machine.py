"""Area ``machine``: cores, memory, limits of processes, memory as a folder, and clocks.

Clocks decide nothing here (no two nodes' are ever compared), but tokens expire by them, and people
read them: a difference is a warning.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from pathlib import Path

import psutil

from infra.disk.forecast import size_of_model
from infra.doctor.check import Check, Finding, Look, ask, doubtful, fine, found, gib, scratch_in
from infra.doctor.slurm import slurm_settings
from infra.host.secrets import masked
from infra.hub.target import endpoint_now
from refiner_core.contract.config import RecipeConfig

#: Files and connections that a worker has open besides its calls of a judge.
_OWN_FILES = 256
_SKEW_S = 5.0
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

_AREA, _HUNG = "machine", "refiner doctor workspace=/ANOTHER/DISK/runs"


def _cores(look: Look) -> Finding:
    cores = len(os.sched_getaffinity(0))
    threads = look.config.model.cpu_threads
    asked = max((s.resources.cpus for s in look.here(look.stages)), default=0)
    set_ = {n: os.environ[n] for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if n in os.environ}
    told = "".join(f", {name}={value} (jobs set their own)" for name, value in set_.items())
    if threads > cores:
        what = f"{cores} cores, and model.cpu_threads={threads} would share them{told}"
        return found("warning", what, f"{look.command('run')} model.cpu_threads={cores}")
    if asked > cores:
        what = f"{cores} cores, and a stage that runs here asks for {asked}: it will be slower"
        return found("warning", what + told)
    return fine(f"{cores} cores for this process{told}")


def _memory(look: Look) -> Finding:
    memory, limit = psutil.virtual_memory(), _cgroup_limit()
    total = min(memory.total, limit or memory.total)
    bound = f", limited to {gib(limit)} by a cgroup" if total < memory.total else ""
    asked = max((s.resources.memory_gb for s in look.here(look.stages)), default=0) << 30
    what = f"{gib(memory.total)}, {gib(min(memory.available, total))} available{bound}"
    if asked <= total:
        return fine(what)
    what += f"; a stage that runs here asks for {gib(asked)}"
    why = "the plan's `memory` says what is needed, stage by stage"
    return found("warning", what, f"{look.command('plan')} --json", why)


def _cgroup_limit() -> int:
    """Bytes that this process's control group may take; 0: no limit that can be read."""
    for name in _CGROUP_LIMITS:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return 0


def _open_files(look: Look) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    calls = look.config.judge.concurrency if look.config.judge.kind == "openai" else 0
    least = max(1024, calls + _OWN_FILES)
    what = f"{soft} at a time (ulimit -n)"
    if soft >= least or soft == resource.RLIM_INFINITY:
        return fine(what)
    mend = f"ulimit -n {least}"
    if hard != resource.RLIM_INFINITY and hard < least:
        mend = f"echo '* hard nofile {least}' | sudo tee -a /etc/security/limits.conf"
    why = f"{calls} calls of the judge at a time" if calls else "data, logs and pipes of jobs"
    return found("warning", f"{what}, and {least} are better", mend, why)


def _shared_memory(look: Look) -> Finding | None:
    folder = Path(look.config.grpo.rollout_server.weights_dir)
    name, why = str(folder), "weights go to rollout servers through it"
    if not look.rollout_servers:
        if not folder.is_dir():
            return None
        return fine(f"{gib(shutil.disk_usage(folder).free)} free (memory as a folder)", name=name)
    state = doubtful(look.serves_here)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        mend = f"{look.command('run')} grpo.rollout_server.weights_dir=/tmp"
        return found(state, "not a folder that can be written to", mend, why, name=name)
    room, wanted = shutil.disk_usage(folder).free, weight_bytes(look.config)
    what = f"{gib(room)} free, the policy's weights take {gib(wanted)}"
    if room >= wanted:
        return fine(what, name=name)
    mend = f"sudo mount -o remount,size={2 * wanted >> 30}G {folder}"
    return found(state, what, mend, why, name=name)


def weight_bytes(config: RecipeConfig) -> int:
    """Bytes that the model's weights take in its own type; 0 where its size is not known."""
    return (size_of_model(config).parameters or 0) * _WEIGHT_BYTES[config.model.dtype]


# ---------------------------------------------------------------- clocks


def _clock_of_files(look: Look) -> Finding:
    with scratch_in(look.workspace) as folder:
        before = time.time()
        (folder / "clock").write_text("x")
        stamp, after = (folder / "clock").stat().st_mtime, time.time()
    # Times of files may be whole seconds.
    off = min((stamp - before, stamp - after), key=abs) if not before <= stamp <= after else 0.0
    return _skew(off, 2.0 if stamp.is_integer() else 0.5)


def _clock_of_slurm(look: Look) -> Finding | None:
    if look.on_node or shutil.which("scontrol") is None:
        return None
    before, at = time.time(), slurm_settings(look).at
    return None if at is None else _skew_since(before, at)


def _clock_of_hub(look: Look) -> Finding | None:
    if look.offline or look.on_node:
        return None
    before = time.time()
    try:
        request = urllib.request.Request(endpoint_now(), method="HEAD")
        with urllib.request.urlopen(request, timeout=8) as answer:
            said = answer.headers.get("Date", "")
    except urllib.error.HTTPError as error:
        said = error.headers.get("Date", "")
    except (OSError, ValueError):
        return None  # whether the Hub answers is looked at under `hub`
    name = f"clock of {masked(endpoint_now())}"
    return _skew_since(before, parsedate_to_datetime(said).timestamp(), name) if said else None


def _skew_since(before: float, there: float, name: str = "") -> Finding:
    now = time.time()
    return _skew(there - (before + now) / 2, 1.5 + now - before, name)


def _skew(off_s: float, doubt_s: float, name: str = "") -> Finding:
    if abs(off_s) <= max(_SKEW_S, doubt_s):
        return fine(f"agrees with this machine's within {doubt_s:.1f} s", name=name)
    what = f"{abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} this machine's"
    why = "tokens and times in logs; no decision rests on it"
    return found("warning", what, "sudo timedatectl set-ntp true", why, name=name)


def _host(look: Look) -> Finding:
    """The system that looks: of use in a report that somebody else reads."""
    kernel = ask(["uname", "-sr"], 5).out.strip() or os.uname().sysname
    return fine(f"{kernel} on {os.uname().nodename}")


_CONTROLLER = ("clock of Slurm's controller", _clock_of_slurm)
CHECKS = (
    Check(_AREA, "system", _host),
    Check(_AREA, "cores", _cores),
    Check(_AREA, "memory", _memory),
    Check(_AREA, "open files", _open_files),
    Check(_AREA, "memory as a folder", _shared_memory, needed=lambda x: x.rollout_servers),
    Check(_AREA, "clock of the file system", _clock_of_files, limit_s=15, hung=_HUNG),
    Check(_AREA, *_CONTROLLER, limit_s=15, hung="sudo systemctl restart slurmctld"),
    Check(_AREA, "clock of the Hub", _clock_of_hub, limit_s=10),
)
