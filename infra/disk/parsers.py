"""Parsers of what quota tools print. Pure: text in, :class:`Quota` values out.

In: the captured output of one tool. Out: per quota that applies, what is used and what is allowed,
in bytes and in inodes. A tool's exit status is not looked at (`quota` exits with 1 both when over
and when there is none); what is there to be read decides.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote

_KIB = 1024
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}
_SIZE = re.compile(r"([\d.,]*\d)\s*([kmgtpe]?)(i?b?)", re.IGNORECASE)


class Limit(NamedTuple):
    """One resource of one quota; 0 is no limit.

    ``grace`` is the time left above the soft limit, in the tool's words; once it is ``over``, the
    soft limit counts as the hard one.
    """

    used: int
    soft: int = 0
    hard: int = 0
    grace: str = ""
    over: bool = False

    @property
    def effective(self) -> int | None:
        """Most that may be used now; None where nothing limits it."""
        limits = [self.hard] if self.hard > 0 else []
        if self.over and self.soft > 0:
            limits.append(self.soft)
        return min(limits, default=None)

    @property
    def free(self) -> int | None:
        """Amount that is left; None where nothing limits it."""
        limit = self.effective
        return None if limit is None else max(0, limit - self.used)


class Quota(NamedTuple):
    """One quota: whose, on what, and its limits. ``doubt`` is what the tool says against its own
    numbers."""

    whose: str
    where: str
    bytes: Limit
    inodes: Limit | None = None
    doubt: str = ""


def parse_size(text: str) -> int:
    """A number of bytes from ``12345``, ``56.3G``, ``1,024 KiB`` (1024 each) or ``2 TB`` (1000).

    Raises
    ------
    ValueError
        It is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size")
    number, unit, tail = match.groups()
    base = 1000 if unit and tail.lower() == "b" else 1024
    return int(float(number.replace(",", "")) * base ** _UNITS[unit.lower()])


# ---------------------------------------------------------------- quota, lfs quota

_DOUBT = "some targets do not answer, so the numbers are too low"
_WHOSE = re.compile(r"Disk quotas for (?:usr |grp |prj |prjid )?(.*?)\s*\(")
#: What the tools write when the time above the soft limit has run out.
_GRACE_OVER = ("none", "expired")


def parse_quota(text: str) -> list[Quota]:
    """Rows of `quota`, `quota -w` and `lfs quota` (units of KiB); wrapped lines are joined."""
    found, whose = [], ""
    doubt = _DOUBT if "inaccurate" in text else ""
    for line in _unwrapped(text):
        if title := _WHOSE.search(line):
            whose = title.group(1)
        where, *cells = line.split() or [""]
        row = _quota_cells([c.strip("*[]") for c in cells])
        if row is not None:
            space, inodes = _limit(*row[:4], unit=_KIB), _limit(*row[4:], unit=1)
            found.append(Quota(whose, where, space, inodes, _DOUBT if "[" in line else doubt))
    return found


def _quota_cells(cells: list[str]) -> list[str] | None:
    """Used, soft, hard, grace of blocks and of files; None where a line is no such row.

    A grace time that does not run may be left out; one that is there is no bare number.
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
    """Lines; a file system's name that stands alone is put before the numbers of the next one."""
    waiting = ""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 1 and not words[0].endswith(":") and not waiting:
            waiting = words[0]
            continue
        yield f"{waiting} {line}" if waiting and words and words[0][0] in "0123456789[" else line
        waiting = ""


def _limit(used: str, soft: str, hard: str, grace: str, *, unit: int) -> Limit:
    over = grace in _GRACE_OVER
    left = "" if over or not grace.strip("-") else grace
    return Limit(int(used) * unit, int(soft) * unit, int(hard) * unit, left, over)


# ---------------------------------------------------------------- repquota -O csv


def parse_repquota_csv(text: str, name: str) -> list[Quota]:
    """The rows of `repquota -O csv` (units of KiB) whose first column is ``name`` or ``#name``."""
    lines = [line for line in text.splitlines() if line.count(",") >= 10]
    found = []
    for row in csv.reader(io.StringIO("\n".join(lines[1:]))):
        if row[0] not in (name, f"#{name}"):
            continue
        space = _limit(row[3], row[4], row[5], row[6], unit=_KIB)
        inodes = _limit(row[7], row[8], row[9], row[10], unit=1)
        found.append(Quota(f"{lines[0].split(',')[0].lower()} {row[0]}", "", space, inodes))
    return found


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
        # Grace is `--------` where none runs, and `-none-` where it has run out.
        used, soft, hard, grace = parts[1:5]
        space, inodes = _limit(used, soft, hard, grace.strip("- "), unit=_KIB), None
        if parts[5] is not None:
            used, soft, hard, grace = parts[5:9]
            inodes = _limit(used, soft, hard, grace.strip("- "), unit=1)
        found.append(Quota(whose, parts[9], space, inodes))
    return found


# ---------------------------------------------------------------- btrfs qgroup show


def parse_btrfs_qgroups(text: str) -> list[Quota]:
    """Rows of `btrfs qgroup show --raw -re` (bytes); the columns are those of its header."""
    found: list[Quota] = []
    columns: list[str] = []
    doubt = "btrfs calls its own numbers inconsistent" if "inconsistent" in text else ""
    for line in text.splitlines():
        cells, words = re.split(r"\s{2,}|\s+(?=\S+$)", line.strip()), line.split()
        if "qgroupid" in re.split(r"\s{2,}", line.strip())[0].lower():
            # Newer versions write `Max referenced`, older ones `max_rfer`.
            header = line.lower().replace("max referenced", "max_rfer")
            header = header.replace("max exclusive", "max_excl")
            columns = header.replace("referenced", "rfer").replace("exclusive", "excl").split()
        elif columns and words and re.fullmatch(r"\d+/\d+", words[0]):
            row = dict(zip(columns, words, strict=False))
            for used, limit in (("rfer", "max_rfer"), ("excl", "max_excl")):
                hard = row.get(limit, "none")
                space = Limit(int(row[used]), hard=0 if hard == "none" else int(hard))
                found.append(Quota(f"qgroup {words[0]}", cells[-1], space, doubt=doubt))
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
            where, doubt = row.get("filesystemName", ""), row.get("remarks", "").strip()
            found.append(Quota(whose, where, space, inodes, doubt))
    return found


def _gpfs_limit(row: dict[str, str], kind: str, unit: int) -> Limit:
    # What is "in doubt" may have been used by other nodes already. `none`: no grace runs here.
    used = int(row[f"{kind}Usage"]) + int(row.get(f"{kind}InDoubt") or 0)
    grace = row.get(f"{kind}Grace", "none").replace("none", "")
    return _limit(str(used), row[f"{kind}Quota"], row[f"{kind}Limit"], grace, unit=unit)


# ---------------------------------------------------------------- a site's own tool


def parse_with_pattern(text: str, pattern: str) -> list[Quota]:
    """Figures that a pattern of the user's finds: groups `used` and `limit`, or `free`; optionally
    `inodes_used` and `inodes_limit`.

    Raises
    ------
    ValueError
        Nothing matches, a group is missing, or what it holds is no size.
    """
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise ValueError("the pattern matches nothing in the output")
    got = {name: value for name, value in match.groupdict().items() if value is not None}
    if "free" in got:
        used = parse_size(got.get("used", "0"))
        space = Limit(used, hard=max(1, used + parse_size(got["free"])))
    elif "used" in got and "limit" in got:
        space = Limit(parse_size(got["used"]), hard=max(1, parse_size(got["limit"])))
    else:
        raise ValueError("the pattern needs groups named `used` and `limit`, or `free`")
    inodes = None
    if "inodes_used" in got and "inodes_limit" in got:
        used, limit = parse_size(got["inodes_used"]), parse_size(got["inodes_limit"])
        inodes = Limit(used, hard=max(1, limit))
    return [Quota("", "", space, inodes)]
