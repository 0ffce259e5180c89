"""Provenance of results: pinned code, versions, machine, command; proofs and certificates.

Jobs import a copy of the four packages as the run's process imported them, so editing a checkout
changes no queued job: ``code/<digest>/`` in the workspace, made once per content and renamed into
place. It is named by its digest, which is verified before jobs import it: a folder of the right
name may come from any user.

Run records and results state their origin, never with environment variables. Secrets in a
command line are masked; uncommitted changes of a checkout are stored as text beside the run.

The newest proof of a stage and the newest certificate of a machine::

    proofs/<stage id>/proof.json          by `refiner prove-resume`, last
    proofs/scratch/<id>/                  workspaces of a proof in progress, or of one that diverged
                        owner.json        the process that works on it; removed if it is kept
    certificates/<node>.json              by `refiner certify`

``scratch`` is in the data root. One writer per file; a second proof of a stage, or certificate of
a node, replaces the first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import re
import secrets
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from infra.host.files import PASSING, again, exists
from infra.host.processes import ProcessId, host_name, run_program
from infra.host.secrets import MASK, masked
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.workspace import Workspace, doubt_about, is_shared
from refiner_core.contract.checks.secrets import is_secret_name
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.proofs import (
    CERTIFICATE_VERSION,
    PROOF_VERSION,
    Certificate,
    ResumeProof,
)
from refiner_core.contract.records import to_json

PACKAGES = ("flows", "sweeps", "refiner_core", "infra")
#: A module that only versions with an attempt's parts in separate files have.
_APART = "infra/store/proof_records.py"
_CACHE = "__pycache__"
_LEFT_OUT_SUFFIXES = (".pyc", ".pyo", ".so", ".swp")


def snapshot_code(workspace: Workspace, packages: Sequence[str] = PACKAGES) -> Path:
    """Copy the packages into the workspace, unless the same code is there already. Returns the
    folder: its name goes into the run's record, its path in front of a job's imports.

    Raises
    ------
    NoSpaceError
        It did not fit.
    WorkspaceError
        The folder of its name has other code.
    """
    files = dict(_source_files(packages))
    contents = {name: again(path.read_bytes) for name, path in files.items()}
    target = workspace.layout.code / _digest(contents)
    if not exists(target):
        with no_space_guard(workspace.root, "pinning the code"):
            _write(target, contents)
    check_snapshot(workspace, target)
    return target


def require_snapshot(workspace: Workspace, code: str) -> None:
    """Ensure that a run's code is there, complete and unchanged, before jobs import it.

    Raises
    ------
    WorkspaceError
        It is gone, and this process has other code; or it differs from what was pinned.
    """
    target = workspace.layout.code / code
    if exists(target):
        check_snapshot(workspace, target)
    elif snapshot_code(workspace) != target:
        raise _gone(target)


def reads_parts_apart(workspace: Workspace, code: str) -> bool:
    """Tell whether a run's code reads an attempt's configuration and inputs from separate files:
    it has a module that later versions do not have."""
    return bool(code) and exists(workspace.layout.code / code / _APART)


def refuse_other_code(workspace: Workspace) -> None:
    """Refuse to work if this process was given a snapshot but imported other code.

    Raises
    ------
    WorkspaceError
        The snapshot is gone: Python skips a missing folder.
    """
    given = Path(os.environ.get("PYTHONPATH", "").split(os.pathsep)[0])
    ours = Path(__file__).resolve().parents[2]
    if given.parent == workspace.layout.code and given.resolve() != ours:
        raise _gone(given)


def _gone(snapshot: Path) -> WorkspaceError:
    return WorkspaceError(
        f"The code that the run was started with, {snapshot}, is gone",
        expected="the snapshot of the code that jobs import",
        fix="`refiner run` with the recipe and overrides of that run: a new run, which pins the "
        "present code; finished stages are skipped",
    )


def check_snapshot(workspace: Workspace, snapshot: Path) -> None:
    """Verify a snapshot against the digest in its name.

    Raises
    ------
    WorkspaceError
        A file was added, changed or removed, or another user could do so.
    """
    try:
        wrong = again(_difference, snapshot, is_shared(workspace.root))
    except OSError as error:
        if error.errno in PASSING:
            raise
        wrong = f"it cannot be read ({error})"
    if wrong:
        raise WorkspaceError(
            f"{snapshot} is not the code that was pinned there: {wrong}",
            expected="the files whose digest is its name, writable by you alone",
            fix=f"find out who has written there, delete it (`rm -r {snapshot}`), and run the same "
            "command again: the code is pinned again",
        )


def _difference(snapshot: Path, shared: bool) -> str:
    """Difference between a snapshot and its name; empty if there is none."""

    def refuse(error: OSError) -> None:
        raise error

    contents = {}
    for root, folders, names in os.walk(snapshot, onerror=refuse):
        folder = Path(root)
        linked = [name for name in folders if stat.S_ISLNK((folder / name).lstat().st_mode)]
        if doubt := doubt_about(folder, shared=shared):
            return f"{folder}: {doubt}"
        for path in (folder / name for name in (*names, *linked)):
            if not stat.S_ISREG(path.lstat().st_mode):
                return f"{path} is not a file"
            if doubt := doubt_about(path, shared=shared):
                return f"{path}: {doubt}"
            if folder.name != _CACHE:  # Python's compiled files, which no other user can write
                contents[path.relative_to(snapshot).as_posix()] = path.read_bytes()
    return "" if _digest(contents) == snapshot.name else "files were added, changed or removed"


def _source_files(packages: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"package {package} of refiner cannot be found")
        root = Path(next(iter(spec.submodule_search_locations)))
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(f for f in folders if f != _CACHE and not f.startswith("."))
            for name in sorted(names):
                if name.startswith(".") or name.endswith(_LEFT_OUT_SUFFIXES):
                    continue
                path = Path(folder, name)
                yield f"{package}/{path.relative_to(root).as_posix()}", path


def _digest(contents: dict[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in sorted(contents):
        total.update(f"{name}\0{hashlib.sha256(contents[name]).hexdigest()}\n".encode())
    return total.hexdigest()[:16]


def _write(target: Path, contents: dict[str, bytes]) -> None:
    temporary = atomic.temporary_name(target)
    try:
        for name, data in contents.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        for path in (temporary, *temporary.rglob("*")):
            path.chmod(path.stat().st_mode & ~0o022)  # not even by the group of a shared workspace
        atomic.sync_tree(temporary)
        try:
            temporary.rename(target)
        except OSError:
            if not target.exists():  # else another run has just written the same code
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    atomic.sync_folder(target.parent)


_DISTRIBUTIONS = (
    *("refiner", "torch", "transformers", "tokenizers", "safetensors", "datasets", "numpy"),
    *("pyarrow", "scipy", "accelerate", "deepspeed", "submitit", "prefect", "wandb"),
    *("huggingface-hub", "omegaconf", "aiohttp"),
)
_SNAPSHOT = re.compile(r"[0-9a-f]{16}")  # a worker's packages lie in code/<digest>/
DIFF_LIMIT_BYTES = 1 << 20


class Checkout(NamedTuple):
    """The git state of the code: ``diff`` is the text of uncommitted changes.

    ``dirty`` is None if git did not answer in time.
    """

    commit: str | None
    dirty: bool | None
    diff: str


def run_provenance(command: Sequence[str], code: str, checkout: Checkout) -> dict[str, Any]:
    """Values for a run record. Save ``checkout.diff`` beside it with :func:`limited_diff`."""
    diff = checkout.diff.encode()
    return {
        "commit": checkout.commit,
        "dirty": checkout.dirty,
        "diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
        "code": code,
        "command": masked_command(command),
        **_process(),
    }


def job_provenance(config: RecipeConfig) -> dict[str, Any]:
    """Values for a result: the worker's environment."""
    folder = Path(__file__).resolve().parents[2].name
    return {
        "code": folder if _SNAPSHOT.fullmatch(folder) else None,
        **_process(),
        "seeds": {
            "run": config.seed,
            "split": config.data.split_seed,
            "synthetic": config.data.synthetic_seed,
            "evaluate": config.evaluate.seed,
        },
        "threads": config.model.cpu_threads,
    }


def _process() -> dict[str, Any]:
    return {"versions": dict(versions()), "python": platform.python_version(), "host": host()}


@functools.cache  # slow where many runs are recorded
def versions() -> Mapping[str, str]:
    """Versions of the installed distributions that affect numbers."""
    found = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


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

    A repository that only contains the code, such as a user's own with a `.venv`, does not count.
    Modules beside ours that git does not track are changes, because jobs import them.
    """
    file = file or Path(__file__).resolve()
    known = _git(file.parent, "ls-files", "--error-unmatch", "--", file.name)
    commit = None if known is None else _git(file.parent, "rev-parse", "HEAD")
    if commit is None:
        return Checkout(None, False, "")
    packages = [str(file.parents[2] / name) for name in PACKAGES]
    diff = _git(file.parent, "diff", "HEAD")
    new = _git(file.parent, "ls-files", "--others", "--exclude-standard", "--", *packages)
    dirty = None if diff is None or new is None else bool(diff.strip() or new.strip())
    return Checkout(commit.strip(), dirty, diff or "")


def limited_diff(diff: str, limit: int = DIFF_LIMIT_BYTES) -> str:
    """The diff, cut to ``limit`` bytes with a note."""
    data = diff.encode()
    if len(data) <= limit:
        return diff
    return data[:limit].decode(errors="ignore") + f"\n… cut: {len(data)} bytes in all\n"


def masked_command(command: Sequence[str]) -> list[str]:
    """The argument list with all apparent secrets masked."""
    found: list[str] = []
    flag = ""
    for argument in command:
        name, equals, value = argument.partition("=")
        if is_secret_name(flag) and not argument.startswith("-"):
            argument = MASK
        elif value.strip() and is_secret_name(name):
            argument = f"{name}={MASK}"
        found.append(masked(argument))
        flag = name if name.startswith("-") and not equals else ""
    return found


def this_command() -> list[str]:
    """The command line of this process, masked."""
    return masked_command([Path(sys.argv[0]).name, *sys.argv[1:]])


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = run_program(["git", "-C", str(folder), *arguments], 20)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        return next(_values(Path("/proc/cpuinfo"), "model name"), platform.processor())
    return platform.processor()


def _gpus() -> list[str]:
    """Names from the NVIDIA driver's files, so that no library is imported."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [name for path in files for name in _values(path, "Model:")]


def _values(path: Path, key: str) -> Iterator[str]:
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith(key):
            yield line.partition(":")[2].strip()


_OWNER = "owner.json"


def write_proof(workspace: Workspace, proof: ResumeProof) -> None:
    """Record a proof, with its verdict for read-only consumers.

    Raises
    ------
    NoSpaceError
        It did not fit; the earlier one is still there.
    """
    value = {**to_json(proof), "verdict": proof.verdict}
    workspace.replace(workspace.layout.proof(proof.stage_id), value, "recording the proof")


def read_proof(workspace: Workspace, stage_id: str) -> ResumeProof | None:
    """The newest proof of a stage; None without one.

    Raises
    ------
    WorkspaceError
        It is damaged or of a newer version.
    """
    return workspace.load(ResumeProof, workspace.layout.proof(stage_id), newest=PROOF_VERSION)


def new_scratch(workspace: Workspace, name: str) -> Path:
    """A folder for the workspaces of a proof. Folders of dead processes are removed first, unless
    they were kept on purpose."""
    folder = workspace.layout.proof_scratch
    _remove_abandoned(folder)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    made = folder / f"{stamp}-{name}-{secrets.token_hex(2)}"
    with no_space_guard(folder, "freeing space for a proof"):
        made.mkdir(parents=True)
        atomic.write_json(made / _OWNER, {"process": str(ProcessId.of())})
    return made


def keep_scratch(scratch: Path) -> None:
    """Keep it for inspection until a user deletes it."""
    (scratch / _OWNER).unlink()


def _remove_abandoned(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        owner = atomic.read_json(path / _OWNER)
        process = ProcessId.parse(str(owner["process"])) if owner else None
        if process is not None and process.here and not process.alive:
            atomic.remove_tree(path)


def write_certificate(workspace: Workspace, certificate: Certificate) -> None:
    """Record the certificate of a node.

    Raises
    ------
    NoSpaceError
        It did not fit; the earlier one is still there.
    """
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", str(certificate.host["name"]))
    path = workspace.layout.certificate(name)
    workspace.replace(path, certificate, "recording the certificate")


def read_certificates(workspace: Workspace) -> list[Certificate]:
    """The certificates of all nodes, oldest first.

    Raises
    ------
    WorkspaceError
        One of them is damaged or of a newer version.
    """
    folder = workspace.layout.certificate("").parent
    load = functools.partial(workspace.load, Certificate, newest=CERTIFICATE_VERSION)
    found = [one for one in map(load, sorted(folder.glob("*.json"))) if one is not None]
    return sorted(found, key=lambda one: one.made_at)
