"""The code of a run, pinned: jobs import a copy, so editing a checkout changes no queued job.

In: the four packages as this process has imported them. Out: ``code/<digest>/`` in the workspace,
made once per content (it is named by its digest), and put in place by a rename.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from infra.store import atomic
from infra.store.room import no_space_guard
from infra.store.workspace import Workspace

PACKAGES = ("flows", "sweeps", "refiner_core", "infra")
_LEFT_OUT = ("__pycache__",)
_LEFT_OUT_SUFFIXES = (".pyc", ".pyo", ".so", ".swp")


class CodeSnapshot(NamedTuple):
    """A pinned copy: its id goes into the run's record, its path in front of a job's imports."""

    id: str
    path: Path


def snapshot_code(workspace: Workspace, packages: Sequence[str] = PACKAGES) -> CodeSnapshot:
    """Copy the packages into the workspace, unless the very same code is there already.

    Raises
    ------
    NoSpaceError
        It did not fit.
    """
    files = dict(_source_files(packages))
    contents = {name: path.read_bytes() for name, path in files.items()}
    digest = _digest(contents)
    target = workspace.layout.code / digest
    if not target.exists():
        with no_space_guard(workspace.root, "pinning the code"):
            _write(target, contents)
    return CodeSnapshot(digest, target)


def _source_files(packages: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"package {package} of refiner cannot be found")
        root = Path(next(iter(spec.submodule_search_locations)))
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(f for f in folders if f not in _LEFT_OUT and not f.startswith("."))
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
        atomic.sync_tree(temporary)
        try:
            temporary.rename(target)
        except OSError:
            if not target.exists():  # else another run has just put the same code there
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    atomic.sync_folder(target.parent)
