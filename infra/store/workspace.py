"""The workspace: a folder of records and data, and its ownership.

In: a folder, and perhaps another one for large files. Out: a :class:`Workspace`, which reads and
writes records of stages (:mod:`infra.store.stage_records`) and of calls
(:mod:`infra.store.records`); functions in other modules add sweeps, nights, proofs and
certificates. Every file has one writer; a file with several potential writers is created
exclusively. No locks and no database: it works on NFS and Lustre, for several orchestrators and
users at once.

Code is run from a workspace, so no other user may have written to it. Users who share a workspace
declare that themselves, each for their own account (``REFINER_SHARED_WORKSPACES``): a declaration
in the folder could be written by anyone.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from infra.host.files import again, exists, is_folder, make_folder
from infra.store import atomic
from infra.store.atomic import has_room, no_space_error
from infra.store.layout import Layout
from infra.store.records import RunRecords, now_text
from infra.store.stage_records import StageClaim, StageRecords
from refiner_core.contract.errors import ConfigurationError, WorkspaceError

__all__ = ["FORMAT", "StageClaim", "Workspace", "now_text"]


#: Environment variable: workspaces, or folders of them, that this user shares with others; several
#: are separated like those of PATH.
SHARED = "REFINER_SHARED_WORKSPACES"


def is_shared(root: Path) -> bool:
    """Tell whether this user has declared the workspace ``root`` as shared."""
    named = [Path(name).expanduser() for name in os.environ.get(SHARED, "").split(os.pathsep)]
    real = Path(os.path.realpath(root))
    return any(real.is_relative_to(os.path.realpath(p)) for p in named if p.is_absolute())


def doubt_about(path: Path, *, shared: bool) -> str:
    """Reason why others may have written to a file or folder; empty if they cannot have.

    Links are followed. Root may write anywhere, so root's files are as good as one's own.
    """
    found = again(path.stat)
    if found.st_mode & stat.S_IWOTH:
        return "everyone may write to it"
    if shared:
        return ""
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & stat.S_IWGRP:
        return f"group {found.st_gid} may write to it"
    return ""


def refuse_doubtful(layout: Layout) -> None:
    """Refuse a workspace that another user may have put code or records into.

    Raises
    ------
    WorkspaceError
        Names the folder, and how to declare it as shared.
    """
    root, (folder, doubt) = layout.control, doubtful_folder(layout)
    if folder is None:
        return
    fix = "name another one with `workspace=DIR`"
    if "may write" in doubt:
        fix += f", or, if all its contents are yours, `chmod go-w {folder}`"
    if "everyone" not in doubt:
        fix += f"; share it only with people you trust like yourself: `export {SHARED}={root}`"
    raise WorkspaceError(
        f"{folder} cannot be trusted: {doubt}, and jobs run the contents of a workspace",
        expected=f"a workspace that only you may write to, or one named in {SHARED}",
        fix=fix,
    )


def doubtful_folder(layout: Layout) -> tuple[Path | None, str]:
    """The first folder that another user may have written to, and why; None: there is none."""
    folders = (layout.stages, layout.runs, layout.code, layout.batches, layout.services)
    shared = is_shared(layout.control)
    for folder in (layout.control, *folders, layout.data, layout.data / "stages"):
        if exists(folder) and (doubt := doubt_about(folder, shared=shared)):
            return folder, doubt
    return None, ""


#: Raised when an older refiner would misread the folder. 2: the data are in another folder; without
#: such a folder a workspace still has format 1.
FORMAT = 2


class Workspace(StageRecords, RunRecords):
    """A workspace folder.

    Open it with :meth:`open` to work in it or with :meth:`read_only` to read it (a missing folder
    is then an empty workspace, and nothing is ever written).
    """

    def __init__(self, root: Path, data_root: Path | None = None) -> None:
        control = root.expanduser().absolute()
        super().__init__(Layout(control, (data_root or control).expanduser().absolute()))

    @classmethod
    def open(cls, root: Path | str, data_root: Path | str | None = None) -> Workspace:
        """The workspace at ``root``, created if absent, to work in: jobs will run its contents.

        From then on the umask of this process removes write access of others, and of the group
        unless the workspace is shared.

        Parameters
        ----------
        root
            Folder of the small files.
        data_root
            Folder of the large ones (none: the same, or that of the existing workspace). It is
            recorded when the workspace is created.

        Raises
        ------
        WorkspaceError
            Not a folder, not writable, of a newer format, or its data are missing; or another user
            may have written there (:mod:`infra.store.workspace`).
        ConfigurationError
            It was created with another data root, or that one holds another workspace's data.
        NoSpaceError
            There is no space for even a small file.
        """
        self = cls(Path(root), None if data_root is None else Path(data_root))
        found = self._read_format()
        if found is not None and data_root is not None:
            self._refuse_other_data_root(found)
        try:
            self.require_trust()
            found = found or self._make()
            self.layout = Layout(self.root, self._data_of(found))
            self._check_data_root(found)
            for folder in (self.layout.stages, self.layout.runs, self.layout.code):
                make_folder(folder)
            self.require_trust()
            if not any(os.access(self.root, os.W_OK | os.X_OK) for _ in range(2)):
                raise PermissionError(errno.EACCES, "not writable", str(self.root))
            if not has_room(self.root, 4096):
                raise no_space_error(self.root, "opening the workspace")
        except OSError as error:
            raise self._open_error(error) from error
        self.sets_aside = True
        return self

    @classmethod
    def read_only(cls, root: Path | str) -> Workspace:
        """The workspace at ``root`` for reading; it need not exist.

        Raises
        ------
        WorkspaceError
            It is not a folder, or of a newer format.
        """
        self = cls(Path(root))
        found = self._read_format()
        if found is not None:
            self.layout = Layout(self.root, self._data_of(found))
        return self

    def require_trust(self) -> None:
        """Refuse to use the contents if another user may have written them; files that this process
        creates from then on are writable by this user alone.

        Raises
        ------
        WorkspaceError
            Names the folder, and the fix.
        """
        os.umask(os.umask(0o077) | (0o002 if is_shared(self.root) else 0o022))
        refuse_doubtful(self.layout)

    # ------------------------------------------------------------ creating

    def _make(self) -> dict[str, Any]:
        """Record what this workspace is; of two that create it at once, one decides."""
        value: dict[str, Any] = {"format": 1, "made": now_text()}
        data = self.layout.data
        if data != self.root:
            self._refuse_other_data(value)
            make_folder(data)
            inside = data.is_relative_to(self.root)  # then it moves with the workspace
            name = data.relative_to(self.root).as_posix() if inside else str(data)
            value |= {"format": 2, "data": name, "id": secrets.token_hex(8)}
        make_folder(self.root)
        atomic.create_json(self.layout.format_file, value)
        found = self._read_format() or value
        if data != self.root:
            self._refuse_other_data_root(found)
        return found

    def _read_format(self) -> dict[str, Any] | None:
        try:
            is_other = exists(self.root) and not is_folder(self.root)
        except OSError as error:
            raise self._open_error(error) from error
        if is_other:
            raise WorkspaceError(
                f"The workspace {self.root} is not a folder",
                expected="a folder, or a path that does not exist yet",
                fix="name another one with `workspace=DIR`",
            )
        found = self.read_control(self.layout.format_file)
        number = None if found is None else found.get("format")
        if found is not None and not (isinstance(number, int) and number <= FORMAT):
            raise WorkspaceError(
                f"{self.layout.format_file} names format {number}",
                expected=f"format {FORMAT} or older, which this version of refiner knows",
                fix="use the refiner that made it or a newer one, restore the file, or name "
                "another folder with `workspace=DIR`",
            )
        return found

    # ------------------------------------------------------------ the data root

    def _data_of(self, found: dict[str, Any]) -> Path:
        return self.root / str(found.get("data", ""))  # an absolute one stays as it is

    def _refuse_other_data_root(self, found: dict[str, Any]) -> None:
        recorded = self._data_of(found)
        if os.path.realpath(recorded) == os.path.realpath(self.layout.data):
            return
        raise ConfigurationError(
            f"The workspace {self.root} keeps its data in {recorded}, and data_root is "
            f"{self.layout.data}.",
            expected="the data root that the workspace was created with, or none",
            fix="omit `data_root`, or name another `workspace=`; to move the data, let all jobs "
            f"end, move {recorded} to the new place and name that as `data` in "
            f"{self.layout.format_file}",
        )

    def _check_data_root(self, found: dict[str, Any]) -> None:
        """Check that the data root is there and belongs to this workspace."""
        if "id" not in found:
            return
        mark = self.read_control(self.layout.data_mark)
        if mark is None and self.stage_ids():
            raise WorkspaceError(
                f"{self.layout.data}, where {self.root} keeps its data, is missing or empty",
                expected=f"{self.layout.data_mark.name} and the data of "
                f"{len(self.stage_ids())} stages",
                fix=f"mount it, or correct `data` in {self.layout.format_file}",
            )
        if mark is None:
            make_folder(self.layout.data)
            mark = {"id": found["id"], "workspace": str(self.root)}
            atomic.create_json(self.layout.data_mark, mark)
        self._refuse_other_data(found)

    def _refuse_other_data(self, found: dict[str, Any]) -> None:
        mark = self.read_control(self.layout.data_mark)
        if mark is None or mark.get("id") == found.get("id"):
            return
        if "id" not in found and exists(self.layout.format_file):
            return  # another process has just created it, and its value counts
        raise ConfigurationError(
            f"{self.layout.data} holds the data of another workspace, {mark.get('workspace')}.",
            expected="a data root of its own for each workspace",
            fix="name another `data_root=`",
        )

    def _open_error(self, error: OSError) -> OSError:
        if isinstance(error, WorkspaceError) or getattr(error, "resumable", False):
            return error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return no_space_error(self.root, "opening the workspace", error)
        return WorkspaceError(
            f"The workspace {self.root} cannot be used: {error.strerror or error}",
            expected="a folder in which you may create files",
            fix="correct its permissions, or name another one with `workspace=DIR`",
        )
