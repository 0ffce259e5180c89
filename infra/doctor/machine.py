"""Areas ``machine`` and ``python``: cores, memory, limits of processes, memory as a folder; the
interpreter and the packages, against what refiner's own metadata asks for. Imports none of them.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import platform
import resource
import shlex
import shutil
import sys
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from infra.disk.history import size_of_model
from infra.disk.keeper import gib
from infra.doctor.check import Check, Finding, Look, doubtful, fine, found
from refiner_core.contract.config import RecipeConfig

#: Files and connections that a worker has open besides its calls of a judge.
_OWN_FILES = 256
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


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


def _interpreter(look: Look) -> Finding:
    asked = metadata.metadata("refiner")["Requires-Python"] or ""
    version = platform.python_version()
    what = f"Python {version} at {sys.executable}"
    if SpecifierSet(asked).contains(version, prereleases=True):
        return fine(what)
    mend = "python3.12 -m venv .venv && .venv/bin/python -m pip install ."
    return found("broken", f"{what}, and refiner asks {asked}", mend)


def _packages(look: Look) -> list[Finding]:
    wanted = [r for r in _requirements() if r.marker is None or r.marker.evaluate({"extra": ""})]
    wrong: list[Finding] = []
    for requirement in wanted:
        name, there = requirement.name, installed(requirement.name)
        if there is None or not requirement.specifier.contains(there, prereleases=True):
            is_ = "is not installed" if there is None else f"is {there}"
            asked = f"{name}{requirement.specifier}"
            what = f"{name} {is_}, and refiner asks for {asked}"
            wrong.append(found("broken", what, install(asked), name=name))
    named = ("torch", "transformers", "prefect", "submitit", "wandb", "huggingface-hub")
    versions = ", ".join(f"{name} {installed(name)}" for name in named)
    return wrong or [fine(f"all {len(wanted)} as asked for: {versions}")]


def _requirements() -> list[Requirement]:
    return [Requirement(text) for text in metadata.requires("refiner") or ()]


def asked_for(name: str) -> str:
    """A requirement of refiner's own, as pip takes it: ``torch>=2.13,<2.15``."""
    return next((f"{r.name}{r.specifier}" for r in _requirements() if r.name == name), name)


def installed(name: str) -> str | None:
    """The version of an installed distribution; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def install(*asked: str) -> str:
    """The command that installs these into the environment of this process."""
    return shlex.join([sys.executable, "-m", "pip", "install", *asked])


CHECKS = (
    Check("python", "interpreter", _interpreter, needed=lambda _: True),
    Check("python", "packages", _packages, needed=lambda _: True),
    Check("machine", "cores", _cores),
    Check("machine", "memory", _memory),
    Check("machine", "open files", _open_files),
    Check("machine", "memory as a folder", _shared_memory, needed=lambda x: x.rollout_servers),
)
