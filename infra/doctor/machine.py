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
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import psutil

from infra.disk.history import model_size
from infra.doctor.check import Check, Finding, Look, ask, doubtful, gib, scratch_in
from infra.doctor.slurm import slurm_settings
from infra.host.secrets import masked
from infra.hub.client import endpoint_now
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.generation.load import resolve_ref

_AREA = "machine"
#: Files and connections that a worker has open besides its calls of a judge.
_OWN_FILES = 256
_SKEW_S = 5.0
_SET_CLOCK = "sudo timedatectl set-ntp true"
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def _cores(look: Look) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    threads = look.config.model.cpu_threads
    asked = max((s.resources.cpus for s in look.here(look.stages)), default=0)
    set_ = {n: os.environ[n] for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if n in os.environ}
    told = "".join(f", {name}={value} (jobs set their own)" for name, value in set_.items())
    if threads > cores:
        yield Finding(
            *(_AREA, "cores", "warning"),
            f"{cores} cores, and model.cpu_threads={threads} would share them{told}",
            mend=f"{look.command('run')} model.cpu_threads={cores}",
        )
    elif asked > cores:
        yield Finding(
            *(_AREA, "cores", "warning"),
            f"{cores} cores, and a stage that runs here asks for {asked}: it will be slower{told}",
        )
    else:
        yield Finding(_AREA, "cores", "ok", f"{cores} cores for this process{told}")


def _memory(look: Look) -> Iterator[Finding]:
    total, limit = psutil.virtual_memory().total, _cgroup_limit()
    available = min(psutil.virtual_memory().available, limit or total)
    bound = f", limited to {gib(limit)} by a cgroup" if limit and limit < total else ""
    asked = max((s.resources.memory_gb for s in look.here(look.stages)), default=0) << 30
    what = f"{gib(total)}, {gib(available)} available{bound}"
    if asked > min(total, limit or total):
        yield Finding(
            *(_AREA, "memory", "warning"),
            f"{what}; a stage that runs here asks for {gib(asked)}",
            mend=f"{look.command('plan')} --json",
            why="the plan's `memory` says what is needed, stage by stage",
        )
    else:
        yield Finding(_AREA, "memory", "ok", what)


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


def _open_files(look: Look) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    calls = look.config.judge.concurrency if look.config.judge.kind == "openai" else 0
    least = max(1024, calls + _OWN_FILES)
    if soft >= least or soft == resource.RLIM_INFINITY:
        yield Finding(_AREA, "open files", "ok", f"{soft} at a time (ulimit -n)")
        return
    may = hard == resource.RLIM_INFINITY or hard >= least
    yield Finding(
        *(_AREA, "open files", "warning", f"{soft} at a time (ulimit -n), and {least} are better"),
        mend=f"ulimit -n {least}"
        if may
        else f"echo '* hard nofile {least}' | sudo tee -a /etc/security/limits.conf",
        why=f"{calls} calls of the judge at a time" if calls else "data, logs and pipes of jobs",
    )


def _shared_memory(look: Look) -> Iterator[Finding]:
    server = look.config.grpo.rollout_server
    folder = Path(server.weights_dir)
    if not look.rollout_servers:
        if folder.is_dir():
            room = shutil.disk_usage(folder).free
            yield Finding(_AREA, str(folder), "ok", f"{gib(room)} free (memory as a folder)")
        return
    needed = look.serves_here
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Finding(
            *(_AREA, str(folder), doubtful(needed), "not a folder that can be written to"),
            mend=f"{look.command('run')} grpo.rollout_server.weights_dir=/tmp",
            why="weights go to rollout servers through it",
        )
        return
    room, wanted = shutil.disk_usage(folder).free, weight_bytes(look.config)
    what = f"{gib(room)} free, the policy's weights take {gib(wanted)}"
    if wanted and room < wanted:
        yield Finding(
            *(_AREA, str(folder), doubtful(needed), what),
            mend=f"sudo mount -o remount,size={2 * wanted >> 30}G {folder}",
            why="weights go to rollout servers through it",
        )
    else:
        yield Finding(_AREA, str(folder), "ok", what)


def weight_bytes(config: RecipeConfig) -> int:
    """What the model's weights take in its own type; 0 where its size is not known."""
    name = config.model.name_or_path
    try:
        path: Path | None = Path(resolve_ref(name))
    except RefinerError:
        path = None
    return (model_size(path, name).parameters or 0) * _WEIGHT_BYTES[config.model.dtype]


# ---------------------------------------------------------------- clocks


def _clock_of_files(look: Look) -> Iterator[Finding]:
    with scratch_in(look.workspace) as folder:
        before = time.time()
        (folder / "clock").write_text("x")
        stamp, after = (folder / "clock").stat().st_mtime, time.time()
    # Times of files may be whole seconds.
    off = min((stamp - before, stamp - after), key=abs) if not before <= stamp <= after else 0.0
    yield _skew("clock of the file system", off, 2.0 if stamp.is_integer() else 0.5)


def _clock_of_slurm(look: Look) -> Iterator[Finding]:
    if look.on_node or shutil.which("scontrol") is None:
        return
    before = time.time()
    settings = slurm_settings(look)
    if settings.at is not None:
        off = settings.at - (before + time.time()) / 2
        yield _skew("clock of Slurm's controller", off, 1.5 + time.time() - before)


def _clock_of_hub(look: Look) -> Iterator[Finding]:
    if look.offline or look.on_node:
        return
    before = time.time()
    try:
        request = urllib.request.Request(endpoint_now(), method="HEAD")
        with urllib.request.urlopen(request, timeout=8) as answer:
            said = answer.headers.get("Date", "")
    except urllib.error.HTTPError as error:
        said = error.headers.get("Date", "")
    except (OSError, ValueError):
        return  # whether the Hub answers is looked at under `hub`
    if said:
        off = parsedate_to_datetime(said).timestamp() - (before + time.time()) / 2
        yield _skew(f"clock of {masked(endpoint_now())}", off, 1.5 + time.time() - before)


def _skew(name: str, off_s: float, doubt_s: float) -> Finding:
    if abs(off_s) <= max(_SKEW_S, doubt_s):
        return Finding(_AREA, name, "ok", f"agrees with this machine's within {doubt_s:.1f} s")
    way = "ahead of" if off_s > 0 else "behind"
    return Finding(
        *(_AREA, name, "warning", f"{abs(off_s):.0f} s {way} this machine's"),
        mend=_SET_CLOCK,
        why="tokens and times in logs; no decision rests on it",
    )


def _host(look: Look) -> Iterator[Finding]:
    """Who looks: of use in a report that somebody else reads."""
    answer = ask(["uname", "-sr"], 5)
    name = os.uname().nodename
    yield Finding(_AREA, "system", "ok", f"{answer.out.strip() or os.uname().sysname} on {name}")


_HUNG = "refiner doctor workspace=/ANOTHER/DISK/runs"
CHECKS = (
    Check(_AREA, "system", _host),
    Check(_AREA, "cores", _cores),
    Check(_AREA, "memory", _memory),
    Check(_AREA, "open files", _open_files),
    Check(_AREA, "memory as a folder", _shared_memory, needed=lambda x: x.rollout_servers),
    Check(_AREA, "clock of the file system", _clock_of_files, limit_s=15, hung=_HUNG),
    Check(
        _AREA,
        "clock of Slurm's controller",
        _clock_of_slurm,
        limit_s=15,
        hung="sudo systemctl restart slurmctld",
    ),
    Check(_AREA, "clock of the Hub", _clock_of_hub, limit_s=10),
)
