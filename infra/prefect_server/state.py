"""Where what belongs to one user on one node is kept: Prefect's server, its database, its logs.

In: the environment (``REFINER_STATE_DIR``, ``XDG_STATE_HOME``). Out: a folder of mode 0700 on a
disk of this node.

Prefect's database is SQLite, which must not live on a network file system (locking lies there, and
its write-ahead log ends processes with SIGBUS when a quota is full). A home directory often is on
one, so the default moves to ``/var/tmp`` then; a folder named by ``REFINER_STATE_DIR`` is taken as
it is. Every node has a folder of its own below it, because a server answers only on its own
loopback.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import psutil

from infra.host.processes import host_name
from refiner_core.contract.errors import WorkspaceError

_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "panfs", "wekafs"}
)


def state_dir(env: Mapping[str, str] | None = None) -> Path:
    """This user's state folder on this node; made with mode 0700 where it is missing.

    Raises
    ------
    WorkspaceError
        It cannot be made, or it belongs to somebody else.
    """
    env = os.environ if env is None else env
    base = _base_dir(env)
    folder = base / host_name()
    try:
        for path in (base, folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        # Whoever owns the parent could put another folder in the place of ours.
        if found.st_uid != os.getuid() or base.stat().st_uid not in (os.getuid(), 0):
            raise PermissionError("it or its parent belongs to another user")
        if stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        raise WorkspaceError(
            f"The state folder {folder} cannot be used: {error}.",
            expected="a folder of your own on a disk of this node",
            fix="set REFINER_STATE_DIR to one",
        ) from error
    return folder


def _base_dir(env: Mapping[str, str]) -> Path:
    if named := env.get("REFINER_STATE_DIR"):
        return Path(named).expanduser().absolute()
    if xdg := env.get("XDG_STATE_HOME"):
        base = Path(xdg) / "refiner"
    else:
        base = Path("~/.local/state/refiner").expanduser()
    if is_network_file_system(base):
        return Path(f"/var/tmp/refiner-{os.getuid()}")
    return base


def is_network_file_system(path: Path) -> str:
    """The type of the file system that holds ``path`` where that is one of the network; else
    empty."""
    kind = file_system_of(path)
    return kind if kind in _NETWORK_FILE_SYSTEMS else ""


def file_system_of(path: Path) -> str:
    """Type of the file system that holds ``path`` (or will), such as ``ext4`` or ``nfs4``."""
    path = path.absolute()
    best, kind = "", ""
    for partition in psutil.disk_partitions(all=True):
        mount = partition.mountpoint
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, partition.fstype
    return kind.lower()
