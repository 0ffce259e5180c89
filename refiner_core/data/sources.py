"""Sources of raw rows, and the identity of their content.

In: ``DataConfig`` (a path, Hub id or ``builtin:synthetic`` per kind of row).
Out: :func:`read_rows` yields the rows with their place in the source; :func:`source_digest` returns
a content hash for the plan, without network, torch or parsing.

============================== =================================== =========================
a source is                    recognised by                       its digest
============================== =================================== =========================
JSON Lines                     file ending .jsonl, .ndjson, .json  SHA-256 of the file
Parquet                        file ending .parquet                SHA-256 of the file
`datasets` folder              folder made by ``save_to_disk``     SHA-256 of its Arrow files
Hub data set                   ``owner/name`` that is no file      id, pinned revision, split
synthetic rows                 ``builtin:synthetic``               sizes, seed, sample of rows
============================== =================================== =========================

A digest never contains a path: a moved data set is still the same data set.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from refiner_core.contract.config import DataConfig
from refiner_core.contract.errors import ConfigurationError, DataError

Which = Literal["sft", "rl"]
SourceKind = Literal["none", "synthetic", "jsonl", "parquet", "folder", "hub"]

SYNTHETIC = "builtin:synthetic"
_FILES: dict[str, SourceKind] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".parquet": "parquet",
}
_FORMS = (
    "a .jsonl or .parquet file, a folder made by `datasets` save_to_disk, a Hub id owner/name with "
    f"a pinned revision, or {SYNTHETIC}"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
#: Names that change with every push; a digest of them would not identify the content.
_MOVING_REVISIONS = frozenset({"main", "master", "HEAD"})
#: Generated rows in the digest, so that a changed generator is noticed without a version.
_SAMPLED_ROWS = 3


class RawRow(NamedTuple):
    """A row as in its source; ``origin`` is ``file:line`` for messages."""

    origin: str
    line: int
    row: dict[str, Any]

    def wrong(self, what: str, expected: str) -> DataError:
        """An error about this row."""
        fix = "correct that row, or leave it out of the file"
        return DataError(f"{self.origin} {what}", expected=expected, fix=fix)


@dataclass(frozen=True)
class DataSource:
    """One recognised source. ``path`` is as written by the user; ``size`` counts generated rows."""

    which: Which
    kind: SourceKind
    path: str = ""
    split: str = "train"
    revision: str = ""
    size: int = 0
    seed: int = 0


def resolve_source(config: DataConfig, which: Which, *, pinned: bool = True) -> DataSource:
    """Resolve ``data.{which}_path``.

    ``pinned=False`` accepts a moving revision such as ``main``: a plan can be shown before
    a commit is chosen, but nothing is run on it.

    Raises
    ------
    DataError
        A local file or folder does not exist or has an unknown form.
    ConfigurationError
        A Hub id has no pinned revision, or a builtin does not exist.
    """
    path: str | None = getattr(config, f"{which}_path")
    split: str = getattr(config, f"{which}_split")
    revision: str | None = getattr(config, f"{which}_revision")
    if path is None:
        return DataSource(which, "none")
    if path.startswith("builtin:"):
        if path != SYNTHETIC:
            raise ConfigurationError(
                f"data.{which}_path={path} does not exist",
                expected=SYNTHETIC,
                fix=f"set data.{which}_path={SYNTHETIC}",
            )
        size: int = getattr(config, f"synthetic_{which}_rows")
        return DataSource(which, "synthetic", path, split, size=size, seed=config.synthetic_seed)
    local = Path(path).expanduser()
    if local.is_dir():
        return DataSource(which, "folder", path, split)
    suffix = local.suffix.lower()
    if local.is_file():
        if suffix not in _FILES:
            raise _unusable(which, f"{path} has the unknown ending {suffix or '(none)'!r}")
        if not os.access(local, os.R_OK):
            raise _unusable(which, f"{path} exists, but this user may not read it")
        return DataSource(which, _FILES[suffix], path, split)
    looks_local = suffix in (*_FILES, ".csv", ".arrow", ".gz", ".zst")
    if not _HUB_ID.fullmatch(path) or looks_local or local.parent.is_dir():
        raise _missing(which, path, local)
    if not revision or (pinned and revision in _MOVING_REVISIONS):
        found = f"the moving revision {revision!r}" if revision else "no revision"
        raise ConfigurationError(
            f"data.{which}_path={path} is no local file or folder; taken as a Hub data set it has "
            f"{found}",
            expected="a commit hash or tag, so that a later run reads the same rows",
            fix=f"set data.{which}_revision=COMMIT (or correct data.{which}_path= to a local file)",
        )
    return DataSource(which, "hub", path, split, revision)


def _unusable(which: Which, what: str) -> DataError:
    fix = f"set data.{which}_path= to the right file or folder"
    return DataError(what, expected=_FORMS, fix=fix)


def _missing(which: Which, path: str, local: Path) -> DataError:
    names = [entry.name for entry in local.parent.iterdir()] if local.parent.is_dir() else []
    near = difflib.get_close_matches(local.name, sorted(names), n=3, cutoff=0.5)
    hint = f" (nearby: {', '.join(str(local.parent / name) for name in near)})" if near else ""
    return _unusable(which, f"{path} does not exist{hint}")


# ---------------------------------------------------------------- identity


def source_digest(config: DataConfig, which: Which) -> str:
    """Content digest of the rows of ``which``; cheap, offline and torch-free.

    Raises
    ------
    DataError
        The source does not exist or has an unknown form.
    ConfigurationError
        A Hub id has no pinned revision.
    """
    source = resolve_source(config, which, pinned=False)
    if source.kind == "none":
        return "none"
    if source.kind == "hub":
        return f"hub:{source.path}@{source.revision}/{source.split}"
    if source.kind == "synthetic":
        from refiner_core.data.synthetic import generate_rows

        sample = generate_rows(which, min(source.size, _SAMPLED_ROWS), source.seed)
        text = json.dumps(sample, sort_keys=True).encode()
        short = hashlib.sha256(text).hexdigest()[:16]
        return f"synthetic:{which}:{source.size}:{source.seed}:{short}"
    hasher = hashlib.sha256()
    for file in _content_files(source):
        with file.open("rb") as stream:
            hasher.update(hashlib.file_digest(stream, "sha256").digest())
    return f"sha256:{hasher.hexdigest()}"


def _content_files(source: DataSource) -> list[Path]:
    """The files whose bytes are the rows, in the order of the rows."""
    if source.kind != "folder":
        return [Path(source.path).expanduser()]
    folder = _split_folder(source)
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    files = [folder / entry["filename"] for entry in state["_data_files"]]
    if missing := [file for file in files if not file.is_file()]:
        raise DataError(
            f"{missing[0]} does not exist",
            expected=f"all files that {folder / 'state.json'} lists",
            fix="copy the folder again, completely",
        )
    return files


def _split_folder(source: DataSource) -> Path:
    """The folder of one split of a saved `datasets` folder (itself, if it has no splits)."""
    local, wanted = Path(source.path).expanduser(), source.split
    listing, state = local / "dataset_dict.json", local / "state.json"
    if listing.is_file():
        splits, folder = json.loads(listing.read_text(encoding="utf-8"))["splits"], local / wanted
    elif state.is_file():
        saved = json.loads(state.read_text(encoding="utf-8")).get("_split")
        splits, folder = [wanted if saved is None else saved], local
    else:
        raise DataError(
            f"{source.path} is a folder, but not one that `datasets` has saved",
            expected="dataset_dict.json or state.json in it (Dataset.save_to_disk)",
            fix=f"set data.{source.which}_path= to a file in it, or save it with save_to_disk",
        )
    if wanted not in splits:
        raise DataError(
            f"{source.path} has no split {wanted!r}",
            expected=f"one of {', '.join(splits)}",
            fix=f"set data.{source.which}_split={splits[0]}",
        )
    return folder


# ---------------------------------------------------------------- rows


def read_rows(source: DataSource) -> Iterator[RawRow]:
    """The rows of a source, in order, each with its place.

    Raises
    ------
    DataError
        A line cannot be read (``file:line`` and the reason), or the source has no rows.
    """
    for row in read_all_rows(source):
        if isinstance(row, DataError):
            raise row
        yield row


def read_all_rows(source: DataSource) -> Iterator[RawRow | DataError]:
    """The same, with the error of each line that cannot be read in its place.

    Raises
    ------
    DataError
        The source has no rows, or cannot be read at all.
    """
    readers = {
        "none": lambda _: iter(()),
        "synthetic": _read_synthetic,
        "jsonl": _read_jsonl,
        "parquet": _read_parquet,
        "folder": _read_datasets,
        "hub": _read_datasets,
    }
    parts = {
        "synthetic": f" ({source.which})",
        "folder": f"[{source.split}]",
        "hub": f"@{source.revision}",
    }
    where = source.path + parts.get(source.kind, "")
    empty = source.kind not in ("none", "synthetic")
    for line, row in readers[source.kind](source):
        empty = False
        yield row if isinstance(row, DataError) else RawRow(f"{where}:{line}", line, row)
    if empty:
        raise DataError(
            f"{source.path} holds no rows",
            expected="at least one row",
            fix=f"set data.{source.which}_path= to a file with rows",
        )


_Rows = Iterator[tuple[int, dict[str, Any] | DataError]]


def _read_synthetic(source: DataSource) -> _Rows:
    from refiner_core.data.synthetic import generate_rows

    return enumerate(generate_rows(source.which, source.size, source.seed), start=1)


def _read_jsonl(source: DataSource) -> _Rows:
    from refiner_core.contract.files import json_lines

    for line, row, wrong in json_lines(Path(source.path).expanduser()):
        if not wrong and not isinstance(row, dict):
            wrong = f"is a JSON {type(row).__name__}, not an object"
        yield (
            line,
            row
            if not wrong
            else DataError(
                f"{source.path}:{line} {wrong}",
                expected="one JSON object per line, UTF-8, and no array around all rows",
                fix=f"correct that line of the file that data.{source.which}_path names (`jq -c "
                "'.[]' FILE` writes each row of an array on a line of its own)",
            ),
        )


def _read_parquet(source: DataSource) -> _Rows:
    from refiner_core.contract.files import parquet_rows

    fix = f"write it again, or set data.{source.which}_path= to another file"
    return enumerate(parquet_rows(Path(source.path).expanduser(), fix=fix), start=1)


def _read_datasets(source: DataSource) -> _Rows:
    from datasets import load_dataset, load_from_disk

    if source.kind == "folder":
        _content_files(source)  # refuses an incomplete folder with a clear message
        rows: Any = load_from_disk(str(_split_folder(source)))
    else:
        try:
            rows = load_dataset(source.path, split=source.split, revision=source.revision)
        except Exception as error:  # the client raises OS, HTTP, value and its own errors
            field = f"data.{source.which}"
            raise DataError(
                f"Hub data set {source.path}@{source.revision} could not be read: "
                f"{type(error).__name__}: {error}",
                expected=f"a data set with a split {source.split!r}, reachable or in the cache",
                fix=f"check {field}_path, {field}_split and {field}_revision; log in if it is "
                "private",
            ) from error
    for line, row in enumerate(rows, start=1):
        yield line, dict(row)
