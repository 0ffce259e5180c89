"""`refiner bundle` and `unbundle`: one run as one file, for a colleague.

In: a run; a bundle and a workspace. Out: a ``.tar.gz`` with the records, metrics, logs, evaluated
samples, prepared rows and cards of the run, and weights on request; the same run in another
workspace. Code snapshots, checkpoints and trackers are never included: nothing from a bundle is
executed.

The first member is the manifest: path, size and SHA-256 of every file. ``unbundle`` reads regular
files of the manifest only, into a folder of its own, compares size and hash of each, and moves the
folders into place when all are right: first data, then the records that refer to them, the run
last. A stage that the workspace has already stays as it is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import secrets
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from flows.running.status import required_run
from flows.stored import is_samples_script
from infra.disk.removal import INTENT, intent_of
from infra.host.files import exists, make_folder
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.checkpoints import RECLAIMED
from infra.store.layout import StagePaths
from infra.store.orchestrators import orchestrator_of
from infra.store.records import now_text
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError, NoSpaceError
from refiner_core.contract.records import RunRecord, StageResult, to_json
from refiner_core.contract.services import is_service

MANIFEST = "manifest.json"
_VERSION = 1
_MOST_MANIFEST = 1 << 28
_CHUNK = 1 << 20
#: Endings of weights.
_WEIGHTS = (".safetensors", ".bin", ".pt")
#: Files of an attempt, and folders of its data.
_OF_ATTEMPT = (
    *("intent.json", "job.json", "started.json", "heartbeat.json", "outcome.json", "ranks.json"),
    *("log.txt", "printed.log", "stacks.txt", "metrics.jsonl"),
)
_OF_RUN = ("run.json", "orchestrator.json", "events.jsonl", "label.json", "people.json")
#: Parts of an attempt that are data.
_DATA = ("metrics.jsonl", "output", "rollouts")
_ID = re.compile(r"[A-Za-z0-9][\w.@+-]{0,199}")


@dataclass(frozen=True)
class Bundle:
    """A written bundle: its file, the run, number and bytes of its files."""

    file: Path
    run: str
    files: int
    bytes: int
    weights: bool


@dataclass(frozen=True)
class Unbundled:
    """A run from a bundle: its new stages, and those that the workspace had already."""

    run: str
    stages: tuple[str, ...]
    kept: tuple[str, ...]


def bundle_run(
    run: str | None = None,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    out: str | Path | None = None,
    weights: bool = False,
    rollouts: bool = False,
) -> Bundle:
    """Write a run to one file.

    Parameters
    ----------
    run
        An unambiguous part of its id (default: the newest).
    workspace
        The folder that has its records.
    out
        The new file (default: ``RUN.tar.gz`` in the current folder).
    weights, rollouts
        Include exported weights; the rollouts of training.

    Returns
    -------
    Bundle
        The file.

    Raises
    ------
    ConfigurationError
        There is no such run, it is running, or the file exists.
    NoSpaceError
        The bundle does not fit.
    """
    ws = Workspace.read_only(workspace)
    record = required_run(ws, run, "a run to bundle")
    target = Path(out or f"{record.run}.tar.gz").expanduser().absolute()
    if orchestrator_of(ws, record.run).works:
        raise ConfigurationError(
            f"{record.run} is running.", expected="a run that has ended", fix="wait, or cancel it"
        )
    if target.exists():
        raise ConfigurationError(
            f"{target} exists.", expected="a new file", fix="name another one with --out"
        )
    files = dict(_files(ws, record, weights=weights, rollouts=rollouts))
    sizes = [_size_and_hash(source) for source in files.values()]
    entries = [[name, *found] for name, found in zip(files, sizes, strict=True)]
    manifest = {
        **{"version": _VERSION, "run": record.run, "recipe": record.recipe, "made_at": now_text()},
        **{"weights": weights, "files": entries},
    }
    temporary = atomic.temporary_name(target)
    try:
        with no_space_guard(target.parent, "writing the bundle"), temporary.open("wb") as raw:
            with tarfile.open(fileobj=raw, mode="w:gz", compresslevel=6) as tar:
                _add(tar, MANIFEST, json.dumps(manifest).encode())
                for name, source in files.items():
                    _add(tar, name, source)
            raw.flush()
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    total = sum(size for size, _ in sizes)
    return Bundle(target, record.run, len(entries), total, weights)


def unbundle(file: str | Path, workspace: str | Path = RecipeConfig.workspace) -> Unbundled:
    """Put the run of a bundle into a workspace.

    Parameters
    ----------
    file
        From :func:`flows.api.bundle_run`.
    workspace
        The folder; created if absent.

    Returns
    -------
    Unbundled
        The run, its new stages, and those that were there already.

    Raises
    ------
    DataError
        The file is no bundle, is damaged, or has anything but the files of its manifest.
    ConfigurationError
        The workspace has this run already.
    NoSpaceError
        It does not fit.
    """
    ws = Workspace.open(workspace)
    place = ws.layout.trash / f"unbundle-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        try:
            tar = stack.enter_context(tarfile.open(Path(file).expanduser(), mode="r|gz"))
            first = tar.next()
            manifest = _manifest(file, tar, first)
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            raise _damaged(file, f"is no bundle: {error}") from error
        run, expected = str(manifest["run"]), _expected(file, manifest)
        if exists(ws.layout.run(run).record):
            raise ConfigurationError(
                f"{ws.root} has the run {run} already.",
                expected="a workspace without it",
                fix="name another workspace=DIR, or remove it there with `refiner rm`",
            )
        _require_space(place.parent, sum(size for size, _ in expected.values()))
        # Left behind by a kill, it is removed like a removal that was interrupted.
        ws.replace(place / INTENT, intent_of((), (), ()), "unpacking the bundle")
        stack.callback(atomic.remove_tree, place)
        with no_space_guard(ws.root, "unpacking the bundle"):
            try:
                _extract(file, tar, expected, place)
            except (tarfile.TarError, EOFError, OSError) as error:
                if isinstance(error, NoSpaceError) or atomic.is_no_space(error):
                    raise
                raise _damaged(file, f"is damaged: {error}") from error
            return _put_in_place(ws, run, place)


# ---------------------------------------------------------------- writing


def _files(
    workspace: Workspace, run: RunRecord, *, weights: bool, rollouts: bool
) -> Iterator[tuple[str, Path | bytes]]:
    """Name in the bundle -> file, or content."""
    layout = workspace.layout
    for name in _OF_RUN:
        yield from _if_there(f"runs/{run.run}/{name}", layout.run(run.run).folder / name)
    turns = layout.run(run.run).turns
    for path in sorted(turns.glob("*.json")):
        yield f"runs/{run.run}/turns/{path.name}", path
    yield from _tree(f"reports/{run.run}", layout.reports / run.run)
    for stage_id in dict.fromkeys(run.stages.values()):
        if is_service(stage_id):
            continue
        stage = layout.stage(stage_id)
        for path in (stage.spec, stage.result):
            yield from _if_there(f"stages/{stage_id}/{path.name}", path)
        for number in stage.attempt_numbers():
            paths, folder = stage.attempt(number), f"stages/{stage_id}/attempts/{number:04d}"
            for name in _OF_ATTEMPT:
                source = paths.data if name in _DATA else paths.control
                yield from _if_there(f"{folder}/{name}", source / name)
            if rollouts:
                yield from _tree(f"{folder}/rollouts", paths.rollouts)
        yield from _output(workspace, stage, stage_id, weights=weights)


def _output(
    workspace: Workspace, stage: StagePaths, stage_id: str, *, weights: bool
) -> Iterator[tuple[str, Path | bytes]]:
    """Output of a finished stage; what is left out is recorded like a reclaimed output."""
    result = workspace.read_result(stage_id)
    if result is None:
        return
    left = []
    for file in result.files:
        source = stage.data / result.output_dir / file.path
        if (weights or not file.path.endswith(_WEIGHTS)) and exists(source):
            yield f"stages/{stage_id}/{result.output_dir}/{file.path}", source
        else:
            left.append(file)
    reclaimed = stage.control / RECLAIMED
    if exists(reclaimed):
        yield f"stages/{stage_id}/{RECLAIMED}", reclaimed
    elif left:
        yield f"stages/{stage_id}/{RECLAIMED}", _left_out(result, left)


def _left_out(result: StageResult, left: Sequence[Any]) -> bytes:
    way_back = "refiner bundle RUN --weights, where it was made"
    said = {"why": "left out of a bundle", "copy": "where it was made", "way_back": way_back}
    files = to_json(list(left))
    value = {"version": 1, "at": result.finished_at, **said, "files": files}
    return json.dumps(value, indent=1).encode()


def _if_there(name: str, path: Path) -> Iterator[tuple[str, Path]]:
    if exists(path):
        yield name, path


def _tree(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    if exists(folder):
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
            yield f"{name}/{path.relative_to(folder).as_posix()}", path


def _size_and_hash(source: Path | bytes) -> tuple[int, str]:
    if isinstance(source, bytes):
        return len(source), hashlib.sha256(source).hexdigest()
    with source.open("rb") as stream:
        return source.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()


def _add(tar: tarfile.TarFile, name: str, source: Path | bytes) -> None:
    """Add a file without the owner, time and mode of this machine."""
    with contextlib.ExitStack() as stack:
        info = tarfile.TarInfo(name)
        if isinstance(source, bytes):
            stream: IO[bytes] = io.BytesIO(source)
            info.size = len(source)
        else:
            stream = stack.enter_context(source.open("rb"))
            info.size = source.stat().st_size
        tar.addfile(info, stream)


# ---------------------------------------------------------------- reading


def _damaged(file: str | Path, what: str) -> DataError:
    return DataError(
        f"{file} {what}",
        expected="a file that `refiner bundle` has written",
        fix="copy it again, or make it again with `refiner bundle RUN`",
    )


def _manifest(
    file: str | Path, tar: tarfile.TarFile, first: tarfile.TarInfo | None
) -> Mapping[str, Any]:
    regular = first is not None and first.isreg() and first.name == MANIFEST
    if first is None or not regular or first.size > _MOST_MANIFEST:
        raise _damaged(file, "has no manifest")
    stream = tar.extractfile(first)
    found = json.loads(stream.read(_MOST_MANIFEST)) if stream is not None else {}
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise _damaged(file, "is of another version of refiner")
    return found


def _expected(file: str | Path, manifest: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Size and hash by path; refuses a path that leads anywhere else."""
    run, found = str(manifest["run"]), dict[str, tuple[int, str]]()
    for name, size, digest in manifest["files"]:
        parts = PurePosixPath(str(name)).parts
        plain = len(parts) > 2 and parts[0] in ("runs", "stages", "reports")
        plain = plain and all(_ID.fullmatch(part) for part in parts)
        plain = plain and (parts[0] == "stages" or parts[1] == run)
        if not plain or "/".join(parts) != name or int(size) < 0 or name in found:
            raise _damaged(file, f"names the file {str(name)[:200]!r}")
        found[str(name)] = int(size), str(digest)
    return found


def _require_space(folder: Path, size: int) -> None:
    make_folder(folder)
    free = shutil.disk_usage(folder).free
    if size > free:
        raise NoSpaceError(
            f"The bundle needs {size:,} bytes, and {free:,} are free in {folder}.",
            expected="space for all of its files",
            fix="free some, or name another workspace=DIR",
        )


def _extract(
    file: str | Path, tar: tarfile.TarFile, expected: Mapping[str, tuple[int, str]], place: Path
) -> None:
    left = dict(expected)
    for member in tar:
        if member.name == MANIFEST:
            continue
        size, digest = left.pop(member.name, (-1, ""))
        stream = tar.extractfile(member) if member.isreg() and member.size == size else None
        if stream is None:
            raise _damaged(file, f"has {member.name[:200]!r}, which its manifest does not have so")
        target = place / member.name
        make_folder(target.parent)
        found = hashlib.sha256()
        with target.open("xb") as out:
            while chunk := stream.read(_CHUNK):
                found.update(chunk)
                out.write(chunk)
        if found.hexdigest() != digest:
            raise _damaged(file, f"is damaged: {member.name} has other content than its manifest")
    if left:
        raise _damaged(file, f"lacks {next(iter(left))}")
    for path in place.glob("reports/*/**/*.js"):
        if not is_samples_script(path):
            raise _damaged(file, f"has {path.name}, which is no script of a page of samples")


def _put_in_place(workspace: Workspace, run: str, place: Path) -> Unbundled:
    layout = workspace.layout
    made, kept = [], []
    for folder in sorted((place / "stages").glob("*")):
        stage = layout.stage(folder.name)
        if exists(stage.control):
            kept.append(folder.name)
            continue
        if stage.data != stage.control:
            _move_data(folder, stage.data)
        _move(folder, stage.control)
        made.append(folder.name)
    _move(place / "reports" / run, layout.reports / run)
    _move(place / "runs" / run, layout.run(run).folder)
    return Unbundled(run, tuple(made), tuple(kept))


def _move_data(folder: Path, target: Path) -> None:
    for attempt in sorted((folder / "attempts").glob("*")):
        for name in _DATA:
            _move(attempt / name, target / "attempts" / attempt.name / name)


def _move(source: Path, target: Path) -> None:
    """Move a file or folder, if it is there and the target is not."""
    if exists(source) and not exists(target):
        make_folder(target.parent)
        shutil.move(source, target)
