"""Whose a workspace is: code is run from it, so nobody else may have put anything there.

In: its folders. Out: why one of them cannot be trusted. Those who want to work in one workspace
together say so themselves, each for their own account (``REFINER_SHARED_WORKSPACES``): what the
folder says of itself is written by whoever made it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from infra.host.reading import again, exists
from infra.store.layout import Layout
from refiner_core.contract.errors import WorkspaceError

#: Environment variable: workspaces, or folders of them, that this user shares with others; several
#: are separated like those of PATH.
SHARED = "REFINER_SHARED_WORKSPACES"


def is_shared(root: Path) -> bool:
    """Whether this user has said that others may write to the workspace ``root``."""
    named = [Path(name).expanduser() for name in os.environ.get(SHARED, "").split(os.pathsep)]
    real = Path(os.path.realpath(root))
    return any(real.is_relative_to(os.path.realpath(p)) for p in named if p.is_absolute())


def keep_others_out(shared: bool) -> None:
    """Make nothing in this process, or in what it starts, that strangers may write to."""
    os.umask(os.umask(0o077) | (0o002 if shared else 0o022))


def doubt_about(path: Path, *, shared: bool) -> str:
    """Why others may have written to a file or folder; empty where they cannot have.

    Links are followed. Root may write anywhere, so what is root's is as good as one's own.
    """
    found = again(path.stat)
    if found.st_mode & stat.S_IWOTH:
        return "everybody may write to it"
    if shared:
        return ""
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & stat.S_IWGRP:
        return f"group {found.st_gid} may write to it"
    return ""


def refuse_doubtful(layout: Layout) -> None:
    """Refuse a workspace into which somebody else may have put code or records.

    Raises
    ------
    WorkspaceError
        Names the folder, and how to say that it is shared.
    """
    root, (folder, doubt) = layout.control, doubtful_folder(layout)
    if folder is None:
        return
    fix = "name another one with `workspace=DIR`"
    if "may write" in doubt:
        fix += f", or, if all that lies there is yours, `chmod go-w {folder}`"
    if "everybody" not in doubt:
        fix += f"; share it only with whom you trust as yourself: `export {SHARED}={root}`"
    raise WorkspaceError(
        f"{folder} cannot be trusted: {doubt}, and jobs run what lies in a workspace",
        expected=f"a workspace that nobody else may write to, or one named in {SHARED}",
        fix=fix,
    )


def doubtful_folder(layout: Layout) -> tuple[Path | None, str]:
    """The first folder into which somebody else may have put something, and why; None: there is
    none."""
    folders = (layout.stages, layout.runs, layout.code, layout.batches, layout.services)
    shared = is_shared(layout.control)
    for folder in (layout.control, *folders, layout.data, layout.data / "stages"):
        if exists(folder) and (doubt := doubt_about(folder, shared=shared)):
            return folder, doubt
    return None, ""
