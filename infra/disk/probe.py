"""Free space from quota tools, the kernel, and a configured limit.

In: a folder and the configuration. Out: one :class:`FreeSpace`, the tightest of all that apply. The
tools depend on the file system's type (``disk.probe=auto``); the file system's own free figures are
always read last, and ignore quotas. A tool that fails, or prints implausible figures, is logged
once and skipped; probing never raises.

Parsers of tools' output are pure: text in, :class:`Quota` values out, one per quota that applies. A
tool's exit status is ignored (`quota` exits with 1 both when over and when there is none); its
output decides.
"""

from __future__ import annotations

import contextlib
import functools
import grp
import logging
import os
import pwd
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from infra.disk.usage import DiskSize
from infra.host.files import Mount, btrfs_subvolume, existing, mount_of, project_id
from infra.host.processes import environment, run_program
from infra.store.atomic import WarningLog
from refiner_core.contract.config import DiskConfig
from refiner_core.contract.errors import ConfigurationError

log = logging.getLogger(__name__)

_KIB = 1024
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}
_SIZE = re.compile(r"([\d.,]*\d)\s*([kmgtpe]?)(i?b?)", re.IGNORECASE)


class QuotaLimit(NamedTuple):
    """One resource of one quota; 0 is no limit. Once the grace time above the soft limit is
    ``over``, the soft limit counts as the hard one."""

    used: int
    soft: int = 0
    hard: int = 0
    over: bool = False

    @property
    def effective(self) -> int | None:
        """Most that may be used now; None if there is no limit."""
        limits = (self.hard, self.soft if self.over else 0)
        return min((limit for limit in limits if limit > 0), default=None)

    @property
    def free(self) -> int | None:
        """Amount that is left; None if there is no limit."""
        limit = self.effective
        return None if limit is None else max(0, limit - self.used)


class Quota(NamedTuple):
    """One quota: its owner, its file system, and its limits."""

    whose: str
    where: str
    bytes: QuotaLimit
    inodes: QuotaLimit | None = None


def parse_size(text: str) -> int:
    """A number of bytes from ``12345``, ``56.3G``, ``1,024 KiB`` (1024 each) or ``2 TB`` (1000).

    Raises
    ------
    ValueError
        The text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size")
    number, unit, tail = match.groups()
    base = 1000 if unit and tail.lower() == "b" else 1024
    return int(float(number.replace(",", "")) * base ** _UNITS[unit.lower()])


# ---------------------------------------------------------------- quota, lfs quota

_WHOSE = re.compile(r"Disk quotas for (?:usr |grp |prj |prjid )?(.*?)\s*\(")
#: Texts of the tools for an expired grace time.
_GRACE_OVER = ("none", "expired")


def parse_quota(text: str) -> list[Quota]:
    """Rows of `quota`, `quota -w` and `lfs quota` (units of KiB); wrapped lines are joined."""
    found, whose = [], ""
    for line in _unwrapped(text):
        if title := _WHOSE.search(line):
            whose = title.group(1)
        where, *cells = line.split() or [""]
        row = _quota_cells([c.strip("*[]") for c in cells])
        if row is not None:
            space, inodes = _limit(*row[:4], unit=_KIB), _limit(*row[4:], unit=1)
            found.append(Quota(whose, where, space, inodes))
    return found


def _quota_cells(cells: list[str]) -> list[str] | None:
    """Used, soft, hard, grace of blocks and of files; None if a line is not such a row.

    A grace time that does not run may be missing; a present one is never a bare number.
    """
    if len(cells) == 6:
        cells = [*cells[:3], "", *cells[3:], ""]
    elif len(cells) == 7 and cells[3].isdigit():
        cells = [*cells[:3], "", *cells[3:]]
    elif len(cells) == 7:
        cells = [*cells, ""]
    numbers = [*cells[:3], *cells[4:7]]
    return cells if len(cells) == 8 and all(n.isdigit() for n in numbers) else None


def _unwrapped(text: str) -> Iterator[str]:
    """Lines; a file system's name alone on a line is joined with the numbers of the next one."""
    waiting = ""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 1 and not words[0].endswith(":") and not waiting:
            waiting = words[0]
            continue
        yield f"{waiting} {line}" if waiting and words and words[0][0] in "0123456789[" else line
        waiting = ""


def _limit(used: str, soft: str, hard: str, grace: str, *, unit: int) -> QuotaLimit:
    return QuotaLimit(int(used) * unit, int(soft) * unit, int(hard) * unit, grace in _GRACE_OVER)


# ---------------------------------------------------------------- xfs_quota

_XFS_PART = r"(\d+)\s+(\d+)\s+(\d+)\s+\d+\s+\[(.*?)\]"
_XFS_ROW = re.compile(rf"^(\S+)\s+{_XFS_PART}(?:\s+{_XFS_PART})?\s+(\S+)\s*$")
_XFS_WHOSE = re.compile(r"^Disk quotas for (\S+ \S+)")


def parse_xfs_quota(text: str) -> list[Quota]:
    """Rows of `xfs_quota -c 'quota -b -i -v …'` (blocks of KiB), without or with a header."""
    found, whose = [], ""
    for line in _unwrapped(text):
        if title := _XFS_WHOSE.match(line):
            whose = title.group(1)
        row = _XFS_ROW.match(line)
        if row is None:
            continue
        parts = row.groups()
        # Grace is `--------` if none runs, and `-none-` if it has expired.
        used, soft, hard, grace = parts[1:5]
        space, inodes = _limit(used, soft, hard, grace.strip("- "), unit=_KIB), None
        if parts[5] is not None:
            used, soft, hard, grace = parts[5:9]
            inodes = _limit(used, soft, hard, grace.strip("- "), unit=1)
        found.append(Quota(whose, parts[9], space, inodes))
    return found


# ---------------------------------------------------------------- mmlsquota -Y


def parse_mmlsquota(text: str) -> list[Quota]:
    """Rows of GPFS' `mmlsquota -Y` (units of KiB); the header line names the fields."""
    found: list[Quota] = []
    names: list[str] = []
    for line in text.splitlines():
        cells = [unquote(c) for c in line.split(":")]
        if cells[2:3] == ["HEADER"]:
            names = cells
            continue
        row = dict(zip(names, cells, strict=False))
        if "blockUsage" in row:
            space, inodes = _gpfs_limit(row, "block", _KIB), _gpfs_limit(row, "files", 1)
            whose = f"{row.get('quotaType', '')} {row.get('name', '')}".strip()
            found.append(Quota(whose, row.get("filesystemName", ""), space, inodes))
    return found


def _gpfs_limit(row: dict[str, str], kind: str, unit: int) -> QuotaLimit:
    # "In doubt" amounts may have been used by other nodes already. `none`: no grace runs here.
    used = int(row[f"{kind}Usage"]) + int(row.get(f"{kind}InDoubt") or 0)
    grace = row.get(f"{kind}Grace", "none").replace("none", "")
    return _limit(str(used), row[f"{kind}Quota"], row[f"{kind}Limit"], grace, unit=unit)


# ---------------------------------------------------------------- a site's own tool


def parse_with_pattern(text: str, pattern: str) -> list[Quota]:
    """Figures found by a user's pattern: groups `used` and `limit`, or `free`; optionally
    `inodes_used` and `inodes_limit`.

    Raises
    ------
    ValueError
        Nothing matches, a group is missing, or its text is not a size.
    """
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise ValueError("the pattern matches nothing in the output")
    got = {name: value for name, value in match.groupdict().items() if value is not None}
    if "free" in got:
        used = parse_size(got.get("used", "0"))
        space = QuotaLimit(used, hard=max(1, used + parse_size(got["free"])))
    elif "used" in got and "limit" in got:
        space = QuotaLimit(parse_size(got["used"]), hard=max(1, parse_size(got["limit"])))
    else:
        raise ValueError("the pattern needs groups named `used` and `limit`, or `free`")
    inodes = None
    if "inodes_used" in got and "inodes_limit" in got:
        used, limit = parse_size(got["inodes_used"]), parse_size(got["inodes_limit"])
        inodes = QuotaLimit(used, hard=max(1, limit))
    return [Quota("", "", space, inodes)]


# ---------------------------------------------------------------- free space

UNLIMITED = 2**62
#: File systems whose free figures show what a write can do.
HONEST = ("tmpfs", "ramfs")


#: A tool is missing, does not end, or printed implausible figures.
_TROUBLE = (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError)


@dataclass(frozen=True)
class FreeSpace:
    """Free space for writing into a folder.

    Attributes
    ----------
    free_bytes
        Bytes that can still be written.
    used_bytes, limit_bytes
        Use, and its limit; None if unknown.
    free_inodes
        Files and folders that can still be created; None if unknown.
    source
        Origin of the figures: ``quota user 1000``, ``btrfs qgroup 0/256``, ``file system`` …
    knows_quota
        Whether the figures include quotas.
    """

    free_bytes: int
    used_bytes: int | None = None
    limit_bytes: int | None = None
    free_inodes: int | None = None
    source: str = ""
    knows_quota: bool = False

    @property
    def share(self) -> float:
        """Used share of the bytes, 0 to 1."""
        return self.used_bytes / self.limit_bytes if self.used_bytes and self.limit_bytes else 0.0


def quota_space(name: str, quota: Quota) -> FreeSpace | None:
    """A quota as free space; None if it limits nothing.

    Raises
    ------
    ValueError
        Its numbers are implausible.
    """
    space, inodes = quota.bytes, quota.inodes
    for limit in (space, inodes):
        if limit is not None and (limit.used < 0 or limit.soft < 0 or limit.hard < 0):
            raise ValueError(f"negative numbers ({quota})")
    free_inodes = None if inodes is None else inodes.free
    if space.free is None and free_inodes is None:
        return None
    return FreeSpace(
        free_bytes=UNLIMITED if space.free is None else space.free,
        used_bytes=None if space.free is None else space.used,
        limit_bytes=space.effective,
        free_inodes=free_inodes,
        source=f"{name} {quota.whose}".strip(),
        knows_quota=name != "disk.limit_gb",
    )


def statvfs_space(folder: Path, mount: Mount) -> FreeSpace | None:
    """The file system's own free figures; None if it gives none."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        log.debug("no free figures of %s: %s", folder, error)
        return None
    total, unused = status.f_blocks * status.f_frsize, status.f_bfree * status.f_frsize
    return FreeSpace(
        free_bytes=status.f_bavail * status.f_frsize,
        used_bytes=total - unused,
        limit_bytes=total - unused + status.f_bavail * status.f_frsize,
        free_inodes=status.f_favail if status.f_files > 0 else None,
        source=f"file system ({mount.type})",
        knows_quota=mount.type in HONEST,
    )


def tightest(spaces: Sequence[FreeSpace]) -> FreeSpace:
    """The space with the fewest free bytes, combined with the fewest free inodes of all."""
    if not spaces:
        return FreeSpace(free_bytes=UNLIMITED, source="nothing")
    space = min(spaces, key=lambda r: r.free_bytes)
    counted = [r.free_inodes for r in spaces if r.free_inodes is not None]
    return replace(
        space,
        free_inodes=min(counted, default=None),
        knows_quota=any(r.knows_quota for r in spaces),
    )


_TOOL_TIMEOUT_S = 20.0
_SYSFS_BTRFS = Path("/sys/fs/btrfs")
_GIB = 2**30


Runner = Callable[[Sequence[str]], str]


def run_tool(command: Sequence[str]) -> str:
    """Output of a command, standard error included; its exit status is ignored.

    Raises
    ------
    OSError, SubprocessError
        It is missing, or does not end.
    """
    done = run_program(command, _TOOL_TIMEOUT_S, {**environment(), "LC_ALL": "C"})
    return done.stdout + done.stderr


class Prober:
    """Measures the free space of one folder repeatedly; logs each problem once.

    Parameters
    ----------
    folder
        Where writes go; it need not exist yet.
    config
        ``probe``, ``pattern``, ``limit_gb``, ``inode_limit``.
    measure
        The present use of the workspace; called only with a configured limit.
    run, mount
        Runs commands; the mount of the folder.

    Raises
    ------
    ConfigurationError
        ``probe`` is unknown.
    """

    def __init__(
        self,
        folder: Path,
        config: DiskConfig,
        *,
        measure: Callable[[], DiskSize] | None = None,
        run: Runner = run_tool,
        mount: Mount | None = None,
    ) -> None:
        self.folder, self.config = folder, config
        self.measure, self.run, self._mount = measure, run, mount
        self._complaints = WarningLog()
        if not config.probe.startswith("command:") and config.probe not in _NAMES:
            raise ConfigurationError(
                f"`disk.probe` is {config.probe!r}",
                expected=f"one of: {', '.join(_NAMES[:-1])}, or `command:PROGRAM ARGUMENTS`",
                fix="name one of these",
            )

    def observe(self) -> FreeSpace:
        """The present free space: the tightest of all that apply."""
        mount = self._mount or mount_of(self.folder)
        base = statvfs_space(existing(self.folder), mount)
        spaces = [base] if base is not None else []
        for name, probe in (*self._probes(mount), ("disk.limit_gb", _ask_own_limit)):
            try:
                quotas = probe(self, mount)
                spaces += [r for q in quotas if (r := quota_space(name, q)) is not None]
            except _TROUBLE as error:
                self._complain(name, error)
        return tightest(spaces)

    def _probes(self, mount: Mount) -> list[tuple[str, Probe]]:
        if self.config.probe.startswith("command:"):
            return [("command", _ask_command)]
        names: Sequence[str] = [self.config.probe.replace("repquota", "quota")]
        if self.config.probe == "auto":
            names = next((v for k, v in _BY_TYPE.items() if mount.type.startswith(k)), ())
        return [(name, _TOOLS[name]) for name in names if name in _TOOLS]

    def _complain(self, name: str, error: Exception) -> None:
        text = "free space cannot be read from %s: %s; the next source is used"
        if isinstance(error, FileNotFoundError) and self.config.probe == "auto":
            log.debug(text, name, error)
        else:
            self._complaints.warn(name, text, name, error)

    def rows(self, parse: Callable[[str], list[Quota]], *command: str) -> list[Quota]:
        """The quotas in one call of a tool. A call that fails is logged and has none: the results
        of other calls count all the same."""
        try:
            text = self.run(command)
            found = parse(text)
            if not found and text.strip() and "none" not in text:
                raise ValueError(f"it printed {text.strip().splitlines()[0]!r}")
        except _TROUBLE as error:
            self._complain(shlex.join(command[:3]), error)
            return []
        return found


# ---------------------------------------------------------------- the tools

Probe = Callable[[Prober, Mount], list[Quota]]


def _ask_own_limit(prober: Prober, mount: Mount) -> list[Quota]:
    config = prober.config
    if (config.limit_gb is None and config.inode_limit is None) or prober.measure is None:
        return []
    used = prober.measure()
    space = QuotaLimit(used.bytes, hard=int((config.limit_gb or 0) * _GIB))
    return [Quota("", "", space, QuotaLimit(used.inodes, hard=config.inode_limit or 0))]


def _owners(folder: Path) -> list[tuple[str, int]]:
    """User, the folder's group and its project (if it has one), each by its option and number."""
    found = [("u", os.geteuid()), ("g", folder.stat().st_gid), ("p", project_id(folder))]
    return [(option, number) for option, number in found if number or option != "p"]


#: Parser and commands of tools that are called per owner of a folder, by option.
_OF_OWNERS: dict[str, tuple[Callable[[str], list[Quota]], dict[str, str]]] = {
    "quota": (
        parse_quota,
        {"u": "quota -w -u", "g": "quota -w -g {name}", "p": "quota -w -P {number}"},
    ),
    "xfs": (
        parse_xfs_quota,
        dict.fromkeys("ugp", "xfs_quota -c 'quota -{option} -b -i -n -N -v {number}' {point}"),
    ),
    "lustre": (parse_quota, dict.fromkeys("ugp", "lfs quota -q -{option} {name} {point}")),
}


def _ask_of_owners(tool: str, prober: Prober, mount: Mount) -> list[Quota]:
    """Quotas of the folder's owners, including rows without a name."""
    found: list[Quota] = []
    parse, commands = _OF_OWNERS[tool]
    for option, number in _owners(existing(prober.folder)):
        name = _name_of(option, number)
        words = {"option": option, "number": number, "name": name, "point": mount.point}
        command = [word.format(**words) for word in shlex.split(commands[option])]
        rows = prober.rows(parse, *command)
        found += [q if q.whose else q._replace(whose=f"-{option} {name}") for q in rows]
    if tool == "quota":  # it lists all file systems
        found = [q for q in found if q.where in (mount.source, str(mount.point))]
    return found


def _ask_btrfs(prober: Prober, mount: Mount) -> list[Quota]:
    """The kernel's own figures of the subvolume, readable by everyone; `btrfs qgroup show`, which
    also has groups of groups, is for root alone."""
    subvolume, device = btrfs_subvolume(prober.folder), Path(mount.source).name
    systems = (path.parents[1] for path in _SYSFS_BTRFS.glob(f"*/devices/{device}"))
    folder = next((system / "qgroups" / f"0_{subvolume}" for system in systems), None)
    if folder is None or not folder.is_dir():
        return []
    value = {p.name: int(p.read_text()) for p in folder.iterdir()}
    # Data not yet on the disk are reserved, and count against the limit.
    reserved = sum(v for name, v in value.items() if name.startswith("rsv_"))
    limits = [
        QuotaLimit(value[u] + reserved, hard=value[f"max_{u}"]) for u in ("referenced", "exclusive")
    ]
    return [Quota(f"qgroup 0/{subvolume}", "", limit) for limit in limits]


def _ask_gpfs(prober: Prober, mount: Mount) -> list[Quota]:
    file_system = mount.source.rpartition("/")[2]
    found = prober.rows(parse_mmlsquota, "mmlsquota", "-Y", file_system)
    return [q for q in found if q.where == file_system]


def _ask_command(prober: Prober, mount: Mount) -> list[Quota]:
    command = shlex.split(prober.config.probe.removeprefix("command:"))
    command = [word.replace("{folder}", str(prober.folder)) for word in command]
    text = prober.run(command)
    if prober.config.pattern is None:
        raise ValueError("`disk.pattern` is needed to read the command's output")
    return parse_with_pattern(text, prober.config.pattern)


_TOOLS: dict[str, Probe] = {
    **{tool: functools.partial(_ask_of_owners, tool) for tool in _OF_OWNERS},
    "btrfs": _ask_btrfs,
    "gpfs": _ask_gpfs,
}
#: Values of `disk.probe`; `repquota` (former) is `quota`.
_NAMES = ("auto", "statvfs", *_TOOLS, "repquota")
#: Tools of `auto`, by the beginning of the file system's type.
_BY_TYPE = {
    **{"btrfs": ("btrfs",), "xfs": ("xfs", "quota"), "ext": ("quota",), "f2fs": ("quota",)},
    **{"nfs": ("quota",), "lustre": ("lustre",), "gpfs": ("gpfs",)},
}


def _name_of(option: str, number: int) -> str:
    with contextlib.suppress(KeyError):  # a container may not know the name
        if option == "u":
            return pwd.getpwuid(number).pw_name
        if option == "g":
            return grp.getgrgid(number).gr_name
    return str(number)
