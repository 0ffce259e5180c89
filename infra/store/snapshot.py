"""The code of a run, pinned: jobs import a copy, so editing a checkout changes no queued job.

In: the four packages as this process has imported them. Out: ``code/<digest>/`` in the workspace,
made once per content, and put in place by a rename. It is named by its digest, and held against it
before jobs import it: a folder of the right name may be anybody's work.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from infra.host.reading import PASSING, again, exists
from infra.store import atomic
from infra.store.ownership import doubt_about, is_shared
from infra.store.room import no_space_guard
from infra.store.workspace import Workspace
from refiner_core.contract.errors import WorkspaceError

PACKAGES = ("flows", "sweeps", "refiner_core", "infra")
#: A module of the versions before an attempt's files became fewer, and of none since.
_APART = "infra/store/proof_records.py"
_CACHE = "__pycache__"
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
    WorkspaceError
        What lies there under its name is other code.
    """
    files = dict(_source_files(packages))
    contents = {name: again(path.read_bytes) for name, path in files.items()}
    digest = _digest(contents)
    target = workspace.layout.code / digest
    if not exists(target):
        with no_space_guard(workspace.root, "pinning the code"):
            _write(target, contents)
    check_snapshot(workspace, target)
    return CodeSnapshot(digest, target)


def require_snapshot(workspace: Workspace, code: str) -> None:
    """See to it that a run's code is there, all of it and nothing else, before jobs import it.

    Raises
    ------
    WorkspaceError
        It is gone, and this process has other code; or it is not what was pinned.
    """
    target = workspace.layout.code / code
    if exists(target):
        check_snapshot(workspace, target)
    elif snapshot_code(workspace).id != code:
        raise _gone(target)


def reads_parts_apart(workspace: Workspace, code: str) -> bool:
    """Whether a run's code is of a version that reads an attempt's configuration and inputs from
    files of their own: it has the module that later ones do not have."""
    return bool(code) and exists(workspace.layout.code / code / _APART)


def refuse_other_code(workspace: Workspace) -> None:
    """Refuse to work where this process was given a snapshot and has imported something else.

    Raises
    ------
    WorkspaceError
        The snapshot is gone: Python passes over a folder that is not there.
    """
    given = Path(os.environ.get("PYTHONPATH", "").split(os.pathsep)[0])
    ours = Path(__file__).resolve().parents[2]
    if given.parent == workspace.layout.code and given.resolve() != ours:
        raise _gone(given)


def _gone(snapshot: Path) -> WorkspaceError:
    return WorkspaceError(
        f"The code that the run was begun with, {snapshot}, is gone",
        expected="the snapshot of the code that jobs import",
        fix="`refiner run` with the recipe and overrides of that run: a new one, which pins the "
        "code as it is now; what is done is skipped",
    )


def check_snapshot(workspace: Workspace, snapshot: Path) -> None:
    """Hold a snapshot against the digest that it is named by.

    Raises
    ------
    WorkspaceError
        A file was added, changed or taken away, or somebody else might do so.
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
            expected="the files whose digest is its name, which only you may change",
            fix=f"find out who has written there, delete it (`rm -r {snapshot}`), and run the same "
            "command again: the code is pinned anew",
        )


def _difference(snapshot: Path, shared: bool) -> str:
    """Why a snapshot is not what its name says; empty where it is."""

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
                return f"{path} is no file"
            if doubt := doubt_about(path, shared=shared):
                return f"{path}: {doubt}"
            if folder.name != _CACHE:  # what Python compiles, and nobody else may write to
                contents[path.relative_to(snapshot).as_posix()] = path.read_bytes()
    return "" if _digest(contents) == snapshot.name else "files were added, changed or taken away"


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
            path.chmod(path.stat().st_mode & ~0o022)  # not even the group of a shared workspace
        atomic.sync_tree(temporary)
        try:
            temporary.rename(target)
        except OSError:
            if not target.exists():  # else another run has just put the same code there
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    atomic.sync_folder(target.parent)
