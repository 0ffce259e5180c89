"""Areas ``python``, ``machine``, ``gpu``, ``vllm``, ``workspace``: packages, cores, memory, GPUs,
torch, FlashAttention; the engines that serve models; and test writes to the folders of a run.

In: the requirements in refiner's own metadata (no package is imported); `nvidia-smi`, and torch in
a process of its own; ``grpo.rollout_server`` and ``judge.serve``, run with the very shell text that
starts a server; a workspace and its data root. Out: findings on versions, permissions, format, kind
of file system, whether it accepts a file (which is removed again), and the free space with its
source. A machine without GPUs is no error unless a stage that requests some runs here. torch is
only checked where there are GPUs, or should be: importing it takes seconds.
"""

from __future__ import annotations

import errno
import importlib.metadata as metadata
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from infra.disk.forecast import WEIGHT_BYTES, size_of_model
from infra.disk.probe import UNLIMITED, FreeSpace, Prober
from infra.disk.usage import size_of
from infra.doctor.check import (
    CheckResult,
    DoctorCheck,
    SystemInfo,
    absent,
    ask,
    doubtful,
    fine,
    found,
    last_json,
)
from infra.host.files import existing, mount_of
from infra.services.process import ServerProgram, shell_text
from infra.store import atomic
from infra.store.workspace import FORMAT, Workspace, refuse_doubtful
from refiner_core.report.printing import size


def _cores(info: SystemInfo) -> CheckResult:
    cores = len(os.sched_getaffinity(0))
    asked = max((s.resources.cpus for s in info.here(info.stages)), default=0)
    if (asked := max(asked, info.config.model.cpu_threads)) > cores:
        what = f"{cores} cores, but {asked} are requested here: it will be slower"
        return found("warning", what, f"{info.command('run')} model.cpu_threads={cores}")
    return fine(f"{cores} cores for this process")


def _memory(info: SystemInfo) -> CheckResult:
    memory = psutil.virtual_memory()
    asked = max((s.resources.memory_gb for s in info.here(info.stages)), default=0) << 30
    what = f"{size(memory.total)}, {size(memory.available)} available"
    if asked <= memory.total:
        return fine(what)
    what += f"; a stage that runs here requests {size(asked)}"
    why = "the plan's `memory` shows the need of every stage"
    return found("warning", what, f"{info.command('plan')} --json", why)


def _shared_memory(info: SystemInfo) -> CheckResult | None:
    if not info.rollout_servers:
        return None
    folder = Path(info.config.grpo.rollout_server.weights_dir)
    name, why = str(folder), "weights go to rollout servers through it"
    state = doubtful(info.serves_here)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        fix = f"{info.command('run')} grpo.rollout_server.weights_dir=/tmp"
        return found(state, "not a folder that can be written to", fix, why, name=name)
    parameters = size_of_model(info.config).parameters or 0
    wanted = parameters * WEIGHT_BYTES[info.config.model.dtype]
    free = shutil.disk_usage(folder).free
    what = f"{size(free)} free, the policy's weights take {size(wanted)}"
    if free >= wanted:
        return fine(what, name=name)
    fix = f"sudo mount -o remount,size={2 * wanted >> 30}G {folder}"
    return found(state, what, fix, why, name=name)


def _packages(info: SystemInfo) -> list[CheckResult]:
    wanted = [r for r in _requirements() if r.marker is None or r.marker.evaluate({"extra": ""})]
    wrong: list[CheckResult] = []
    for requirement in wanted:
        name, there = requirement.name, installed(requirement.name)
        if there is None or not requirement.specifier.contains(there, prereleases=True):
            is_ = "is not installed" if there is None else f"is {there}"
            asked = f"{name}{requirement.specifier}"
            what = f"{name} {is_}, and refiner requires {asked}"
            wrong.append(found("broken", what, install(asked), name=name))
    named = ("torch", "transformers", "prefect", "submitit", "wandb", "huggingface-hub")
    versions = ", ".join(f"{name} {installed(name)}" for name in named)
    python = f"Python {platform.python_version()} at {sys.executable}"
    return wrong or [fine(f"{python}, all {len(wanted)} as required: {versions}")]


def _requirements() -> list[Requirement]:
    return [Requirement(text) for text in metadata.requires("refiner") or ()]


def requested_resources(name: str) -> str:
    """A requirement of refiner in pip's form: ``torch>=2.13,<2.15``."""
    return next((f"{r.name}{r.specifier}" for r in _requirements() if r.name == name), name)


def installed(name: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def install(*asked: str) -> str:
    """The command that installs these into the environment of this process."""
    return shlex.join([sys.executable, "-m", "pip", "install", *asked])


# ---------------------------------------------------------------- GPUs

_SMI_S, _TORCH_S = 15.0, 100.0
_FIELDS = ("name", "driver_version", "memory.total")
_TORCH = """
import json, torch
value = {"version": torch.__version__, "cuda": torch.version.cuda, "why": ""}
try:
    torch.cuda.init()
    for i in range(torch.cuda.device_count()):
        x = torch.ones(64, 64, device=f"cuda:{i}")
        assert float((x @ x).sum()) == 64.0**3
except Exception as error:
    value["why"] = f"{type(error).__name__}: {error}".splitlines()[0]
try:
    import flash_attn
    value["flash"] = ""
except Exception as error:
    value["flash"] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(value))
"""


def _gpus(info: SystemInfo) -> Iterator[CheckResult]:
    if shutil.which("nvidia-smi") is None:
        yield _none(info)
        return
    query = f"--query-gpu={','.join(_FIELDS)}"
    answer = ask(["nvidia-smi", query, "--format=csv,noheader,nounits"], _SMI_S)
    rows = [line.split(", ") for line in answer.out.splitlines() if line.count(",") >= 2]
    if not answer.ok or not rows:
        what = f"`nvidia-smi` {'gave' if answer.hung else 'failed:'} {answer.last_line}"
        why = "GPUs are used through the driver; its last line names what it lacks"
        fix = "sudo dmesg | grep -iE 'NVRM|Xid'"
        yield found(doubtful(info.gpus), what, fix, why, name="driver")
        return
    names = ", ".join(sorted({row[0] for row in rows}))
    memory = min((float(row[2]) for row in rows if row[2].isdigit()), default=0.0) / 1024
    what = f"{len(rows)} x {names}, {memory:.0f} GiB each, driver {rows[0][1]}"
    if len(rows) >= info.gpus:
        yield fine(what)
    else:
        why, fix = "the plan shows which stage gets which GPU", f"{info.command('plan')} --json"
        yield found("broken", f"{what}; a stage requests {info.gpus}", fix, why)
    yield from _torch(info)


def _none(info: SystemInfo) -> CheckResult:
    what = "this machine has no `nvidia-smi`: no GPU, or no driver"
    if info.on_slurm and not info.on_node:
        what += "; stages with GPUs go to Slurm, `srun refiner doctor` checks there"
    if not info.gpus:
        return found("missing", what, why="large models")
    fix = f"{info.command('run')} dispatch.executor=slurm dispatch.profile=PROFILE"
    if info.on_node:  # the next thing to try there
        option = "--gres=gpu:1" if info.profile.gpu_option == "gres" else "--gpus-per-node=1"
        fix = f"srun {option} nvidia-smi --list-gpus"
    return found("broken", what, fix, f"a stage requests {info.gpus} GPUs here")


def _torch(info: SystemInfo) -> Iterator[CheckResult]:
    state, version = doubtful(info.gpus), installed("torch") or "none"
    fix, why = install("--force-reinstall", requested_resources("torch")), "training on these GPUs"
    if "+cpu" in version:
        what = f"torch {version} is built without CUDA"
        yield found(state, what, fix, why, name="torch")
        return
    answer = ask([sys.executable, "-P", "-c", _TORCH], _TORCH_S)
    value = last_json(answer.out)
    if value is None:
        what = f"torch cannot be imported: {answer.last_line}"
        yield found(state, what, fix, name="torch")
        return
    what = f"torch {value['version']}, CUDA {value['cuda']}"
    if value["why"]:
        why = "its CUDA must not be of a later major version than the driver's: see `nvidia-smi`"
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            what += f", CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}"
        yield found(state, f"{what}: {value['why']}", fix, why, name="torch")
    else:
        yield fine(f"{what}; computes on them", name="torch")
    wanted = "flash_attention_2"
    if info.config.model.attn_implementation == wanted and value["flash"]:
        fix = install("--no-build-isolation", requested_resources("flash-attn"))
        what, why = f"cannot be imported: {value['flash']}", f"model.attn_implementation={wanted}"
        yield found(absent(info.gpus), what, fix, why, name="FlashAttention")


# ---------------------------------------------------------------- environments that serve models


#: Limit for importing vLLM and torch from a cold network file system, seconds.
_IMPORT_S = 120.0
_DISTRIBUTION = {"vllm": "vllm", "transformers": "'transformers[serving]'"}
_PROBE = """
import json, sys
from importlib import metadata
value = {"python": sys.version.split()[0]}
try:
    value["engine"] = metadata.version("ENGINE")
    import torch
    value["torch"], value["cuda"] = torch.__version__, torch.version.cuda
    value["gpus"] = torch.cuda.device_count()
    import ENGINE
except Exception as error:
    value["why"] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(value))
"""

_LIMIT_S = _IMPORT_S + 5


def _rollouts(info: SystemInfo) -> CheckResult | None:
    if info.rollout_servers:
        program = ServerProgram(info.config.grpo.rollout_server, "grpo.rollout_server", "vllm")
        return _environment(info, program, info.rollout_gpus)
    if path := shutil.which("vllm"):
        return fine(f"{path} is on PATH", name="vllm")
    fix = _make(info, "grpo.rollout_server", "vllm")
    why = "grpo.generation_backend=vllm, and judge.serve.engine=vllm"
    return found("missing", "no `vllm` on PATH", fix, why, name="vllm")


def _judge(info: SystemInfo) -> CheckResult | None:
    engine = info.judge_engine
    if engine not in ("vllm", "transformers"):
        return None
    program = ServerProgram(info.config.judge.serve, "judge.serve", engine)
    return _environment(info, program, info.config.judge.resources.gpus)


def _environment(info: SystemInfo, program: ServerProgram, gpus: int) -> CheckResult:
    name, engine, needed = program.field, program.engine, info.serves_here
    state, why = doubtful(needed), f"{name} serves models with {engine}"
    if program.lacking:
        elsewhere = "" if needed else " here; `srun refiner doctor` checks a compute node"
        fix = _make(info, name, engine)
        return found(state, program.lacking + elsewhere, fix, why, name=name)
    python = shlex.quote(program.config.python or "python3")
    fix = f"{python} -m pip install --upgrade {_DISTRIBUTION[engine]}"
    answer = ask(["bash", "-c", _text(program)], _IMPORT_S)
    value = last_json(answer.out)
    if value is None:
        if program.config.python is None and answer.ok:
            return fine(f"{engine} {answer.out.split()[-1]} answers", name=name)
        return found(state, f"it cannot be started: {answer.last_line}", fix, why, name=name)
    if value.get("why"):
        what = f"Python {value['python']} cannot use {engine}: {value['why']}"
        return found(state, what, fix, why, name=name)
    build = f"torch {value['torch']}, CUDA {value['cuda'] or 'none'}"
    what = f"{engine} {value['engine']}, {build}, sees {value['gpus']} GPUs"
    if gpus and needed and not value["gpus"]:
        return found(absent(needed), what, fix, f"it needs {gpus} GPUs", name=name)
    return fine(what, name=name)


def _make(info: SystemInfo, field: str, engine: str) -> str:
    """The commands that make an environment of its own, and check it."""
    folder, asked = f"$HOME/{engine}-env", _DISTRIBUTION[engine]
    again = info.again(f"{field}.python={folder}/bin/python")
    return f"python3 -m venv {folder} && {folder}/bin/pip install {asked} && {again}"


def _text(program: ServerProgram) -> str:
    """The shell text of a server, with a test in its place."""
    if program.config.python is None:
        words = [program.engine, "--version" if program.engine == "vllm" else "version"]
    else:
        words = [program.config.python, "-c", _PROBE.replace("ENGINE", program.engine)]
    return shell_text(program.config, shlex.join(words))


# ---------------------------------------------------------------- the workspace


_HUNG = "refiner doctor workspace=/ANOTHER/DISK/runs"
#: File systems that usually have quotas, which their free figures ignore.
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "panfs", "wekafs", "fuse")
#: Not for records of a run: lost with the machine.
_FLEETING = ("tmpfs", "ramfs")


def _folder(info: SystemInfo) -> list[CheckResult]:
    root = info.workspace
    workspace = Workspace.read_only(root)  # refuses a newer format, or no folder
    place = existing(root)
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        what = f"{place} cannot be written to by user {os.geteuid()}"
        fix, why = f"{info.command('run')} workspace=DIR", "it holds all records of a run"
        return [found(doubtful(info.recipe), what, fix, why)]
    if not workspace.layout.format_file.exists():
        where = "is created by the first run" if not root.exists() else "has no run yet"
        return [fine(f"{root} {where}; {place} can be written to")]
    refuse_doubtful(workspace.layout)
    runs = len(workspace.run_ids())
    return [fine(f"{root}: {runs} run{'s' * (runs != 1)}, format {FORMAT} is understood")]


# ---------------------------------------------------------------- the file system


def _file_system(info: SystemInfo) -> Iterator[CheckResult]:
    for name, folder in info.folders.items():
        place, mount = existing(folder), mount_of(folder)
        where, itself = f"{mount.type} at {mount.point}", "file system"
        itself = itself if name == "workspace" else f"{name}: {itself}"
        if not os.access(place, os.W_OK | os.X_OK):
            continue  # reported by the check of the folder
        if number := atomic.refusal(place, 4096):
            what = f"{where} accepts no files: {os.strerror(number)} ({errno.errorcode[number]})"
            fix = f"refiner disk --reclaim workspace={info.workspace}"
            fix = fix if name == "workspace" else f"df -h {folder}"
            yield found("broken", what, fix, "a run would wait for space", name=itself)
        elif mount.type in _FLEETING:
            what = f"{where} is memory: gone when the machine restarts"
            fix = f"{info.command('run')} {name}=/SCRATCH/{os.environ.get('USER', 'me')}/runs"
            yield found("warning", what, fix, name=itself)
        else:
            yield fine(f"{where} accepts files", name=itself)


# ---------------------------------------------------------------- free space


def _space(info: SystemInfo) -> Iterator[CheckResult]:
    for name, folder in info.folders.items():
        yield from _space_of(info, "" if name == "workspace" else f"{name}: ", folder)


def _space_of(info: SystemInfo, prefix: str, folder: Path) -> Iterator[CheckResult]:
    mount, disk = mount_of(folder), info.config.disk
    space = Prober(folder, disk, measure=lambda: size_of(folder), mount=mount).observe()
    what = _space_text(space)
    least = max(1 << 30, int(disk.margin_gb * 2**30))
    full = space.free_bytes < least or (space.free_inodes is not None and space.free_inodes < 1000)
    if full or space.share > disk.warn_share:
        state = doubtful(full and info.recipe and space.free_bytes < 1 << 20)
        fix = f"refiner disk --reclaim workspace={info.workspace}"
        yield found(state, what, fix, "a run pauses when the disk is full", name=f"{prefix}space")
    else:
        yield fine(what, name=f"{prefix}space")
    if not space.knows_quota and mount.type.startswith(_SHARED):
        yield found(
            "warning",
            f"the quota on {mount.type} at {mount.point} is unknown: free figures of the "
            "file system do not include it",
            f'{info.command("run")} disk.probe="command:PROGRAM" disk.pattern="REGEX"',
            "without it a run notices its quota only when a write fails",
            name=f"{prefix}quota",
        )


def _space_text(space: FreeSpace) -> str:
    free = "no limit" if space.free_bytes >= UNLIMITED else f"{size(space.free_bytes)} free"
    limit = f" of {size(space.limit_bytes)}" if space.limit_bytes else ""
    inodes = "" if space.free_inodes is None else f", {space.free_inodes:,} files"
    quota = "" if space.knows_quota else "; no quota is known there"
    return f"{free}{limit}{inodes}, says {space.source}{quota}"


CHECKS = (
    DoctorCheck("python", "packages", _packages, needed=lambda _: True),
    DoctorCheck("machine", "cores", _cores),
    DoctorCheck("machine", "memory", _memory),
    DoctorCheck(
        "machine", "memory as a folder", _shared_memory, needed=lambda x: x.rollout_servers
    ),
    DoctorCheck("workspace", "folder", _folder, 10, lambda x: x.recipe, _HUNG),
    DoctorCheck("workspace", "file system", _file_system, 20, lambda x: x.recipe, _HUNG),
    DoctorCheck("workspace", "space", _space, limit_s=45, hung=_HUNG),
    DoctorCheck("gpu", "GPUs", _gpus, 2 * _SMI_S + _TORCH_S, lambda info: info.gpus, "nvidia-smi"),
    DoctorCheck(
        "vllm", "servers", _rollouts, _LIMIT_S, lambda x: x.rollout_servers and not x.on_slurm
    ),
    DoctorCheck(
        "vllm", "judge's server", _judge, _LIMIT_S, lambda x: x.judge_engine and not x.on_slurm
    ),
)
