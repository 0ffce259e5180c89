"""Where results come from: code, versions, machine, command. Never environment variables.

In: this process and its checkout. Out: JSON-ready mappings for run records and results. Secrets in
a command line are masked; what is uncommitted in a checkout is kept as text beside the run.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from infra.host.processes import host_name
from infra.store.snapshot import PACKAGES
from refiner_core.contract.checks.secrets import is_secret_name
from refiner_core.contract.config import RecipeConfig

_DISTRIBUTIONS = (
    *("refiner", "torch", "transformers", "tokenizers", "safetensors", "datasets", "numpy"),
    *("pyarrow", "scipy", "accelerate", "deepspeed", "submitit", "prefect", "wandb"),
    *("huggingface-hub", "omegaconf", "aiohttp"),
)
_SNAPSHOT = re.compile(r"[0-9a-f]{16}")  # a worker's packages lie in code/<digest>/
DIFF_LIMIT_BYTES = 1 << 20
_MASK = "***"
_MASKS = (
    (re.compile(r"(?i)(://[^/\s:@]+:)[^/\s@]+@"), rf"\g<1>{_MASK}@"),
    (re.compile(r"\b(hf_|sk-|ghp_|github_pat_|glpat-)[\w-]{8,}"), rf"\g<1>{_MASK}"),
)


class Checkout(NamedTuple):
    """The git state of the code: ``diff`` is the text of what is not committed.

    ``dirty`` is None where git did not say in time.
    """

    commit: str | None
    dirty: bool | None
    diff: str


def run_provenance(command: Sequence[str], code: str, checkout: Checkout) -> dict[str, Any]:
    """For a run record. Save ``checkout.diff`` beside it with :func:`limited_diff`."""
    diff = checkout.diff.encode()
    return {
        "commit": checkout.commit,
        "dirty": checkout.dirty,
        "diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
        "code": code,
        "command": masked_command(command),
        "versions": versions(),
        "python": platform.python_version(),
        "host": host(),
    }


def job_provenance(config: RecipeConfig) -> dict[str, Any]:
    """For a result: what the worker ran on."""
    folder = Path(__file__).resolve().parents[2].name
    return {
        "code": folder if _SNAPSHOT.fullmatch(folder) else None,
        "versions": versions(),
        "python": platform.python_version(),
        "host": host(),
        "seeds": {
            "run": config.seed,
            "split": config.data.split_seed,
            "synthetic": config.data.synthetic_seed,
            "evaluate": config.evaluate.seed,
        },
        "threads": config.model.cpu_threads,
    }


def versions() -> dict[str, str]:
    """Versions of the distributions that decide numbers, as far as they are installed."""
    return dict(_versions())


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    """Of this process: read once, which takes a while where many runs are recorded."""
    found = []
    for name in _DISTRIBUTIONS:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def host() -> dict[str, Any]:
    """The kind of machine: processor, cores, memory, GPUs."""
    return {
        "name": host_name(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
    }


def checkout_of(file: Path | None = None) -> Checkout:
    """The git state of the checkout that ``file`` (default: this module) is part of.

    A repository that the code merely lies in, as in somebody's own with a `.venv`, is none. Modules
    beside ours that git does not know are changes, for jobs import them.
    """
    file = file or Path(__file__).resolve()
    if _git(file.parent, "ls-files", "--error-unmatch", "--", file.name) is None:
        return Checkout(None, False, "")
    commit = _git(file.parent, "rev-parse", "HEAD")
    if commit is None:
        return Checkout(None, False, "")
    packages = [str(file.parents[2] / name) for name in PACKAGES]
    diff = _git(file.parent, "diff", "HEAD")
    new = _git(file.parent, "ls-files", "--others", "--exclude-standard", "--", *packages)
    dirty = None if diff is None or new is None else bool(diff.strip() or new.strip())
    return Checkout(commit.strip(), dirty, diff or "")


def limited_diff(diff: str, limit: int = DIFF_LIMIT_BYTES) -> str:
    """The diff, cut to ``limit`` bytes and saying so."""
    data = diff.encode()
    if len(data) <= limit:
        return diff
    return data[:limit].decode(errors="ignore") + f"\n… cut: {len(data)} bytes in all\n"


def masked_command(command: Sequence[str]) -> list[str]:
    """The argument list with the values of everything that looks like a secret masked."""
    masked: list[str] = []
    flag = ""
    for argument in command:
        name, equals, value = argument.partition("=")
        if is_secret_name(flag) and not argument.startswith("-"):
            argument = _MASK
        elif value.strip() and is_secret_name(name):
            argument = f"{name}={_MASK}"
        for pattern, replacement in _MASKS:
            argument = pattern.sub(replacement, argument)
        masked.append(argument)
        flag = name if name.startswith("-") and not equals else ""
    return masked


def this_command() -> list[str]:
    """The command line of this process, masked."""
    return masked_command([Path(sys.argv[0]).name, *sys.argv[1:]])


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=20,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _gpus() -> list[str]:
    """Names from the NVIDIA driver; asked of no library, so that none is imported."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    return names
