"""Publishing into a folder, in the layout of the Hugging Face Hub.

In: a folder with exported weights, the text of a card, a target. Out: the target with
``config.json``, ``model*.safetensors``, the tokenizer's files, ``generation_config.json`` and
``README.md``, swapped in as a whole, and a manifest with SHA-256. A folder that was not published
by refiner is never touched; files that have not changed are linked, not copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import fnmatch
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from infra import atomic
from infra.disk.room import no_space_guard
from refiner_core.contract.errors import ConfigurationError, StageFailed
from refiner_core.contract.records import OutputFile, from_json, to_json

MARKER = ".refiner.json"
CARD = "README.md"
_FILES = (
    *(
        "config.json",
        "generation_config.json",
        "model*.safetensors",
        "model.safetensors.index.json",
    ),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template.*", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*"),
)
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class Published(NamedTuple):
    """What lies in a target now; ``changed`` names the files that this call wrote."""

    path: Path
    files: tuple[OutputFile, ...]
    changed: tuple[str, ...]


def publish_to_folder(weights_dir: Path, card: str, target: Path) -> Published:
    """Publish an export. The same export and card again change nothing.

    Raises
    ------
    ConfigurationError
        ``target`` holds something that refiner has not published, or may not
        be written.
    StageFailed
        ``weights_dir`` is not an export in the layout of the Hub.
    NoSpaceError
        It did not fit; the target is as it was.
    """
    sources = _sources(weights_dir)
    before = {f.path: f for f in _owned(target)}
    with no_space_guard(target.parent, f"publishing to {target}"), _refused_by_name(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        manifest = [_described(name, path) for name, path in sources.items()]
        text = card.encode()
        manifest.append(OutputFile(CARD, len(text), hashlib.sha256(text).hexdigest()))
        manifest.sort(key=lambda f: f.path)
        changed = tuple(f.path for f in manifest if not _unchanged(target, before, f))
        if not changed and set(before) == {f.path for f in manifest}:
            return Published(target, tuple(manifest), ())
        temporary = atomic.temporary_name(target)
        try:
            temporary.mkdir()
            for file in manifest:
                if file.path not in changed and _linked(target / file.path, temporary / file.path):
                    continue
                if file.path == CARD:
                    (temporary / CARD).write_bytes(text)
                else:
                    shutil.copyfile(sources[file.path], temporary / file.path)
            _write_marker(temporary, manifest)
            atomic.sync_tree(temporary)
            _swap_in(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return Published(target, tuple(manifest), changed)


def update_card(target: Path, card: str) -> Published:
    """Replace the card of a published folder; weights stay as they are.

    Raises
    ------
    ConfigurationError
        ``target`` was not published by refiner.
    """
    files = _owned(target)
    if not files:
        raise ConfigurationError(
            f"{target} holds no published model",
            expected="a folder that `refiner publish` has made",
            fix="publish first",
        )
    text = card.encode()
    new = OutputFile(CARD, len(text), hashlib.sha256(text).hexdigest())
    if new in files:
        return Published(target, files, ())
    manifest = sorted([*(f for f in files if f.path != CARD), new], key=lambda f: f.path)
    with no_space_guard(target, "updating the card"):
        atomic.write_bytes(target / CARD, text)
        _write_marker(target, manifest)
    return Published(target, tuple(manifest), (CARD,))


def target_damage(report: Mapping[str, Any]) -> str | None:
    """What a target no longer has of what a publish or card stage put there; None if all is there.

    The report of a publish stage lists ``files``, that of a card stage has only the ``card``, which
    replaces the published one. What lies there is known by the target's own manifest.
    """
    if "target" not in report:
        return None
    target = Path(str(report["target"]))
    wanted = {f["path"]: f["sha256"] for f in report.get("files", ()) if f["path"] != CARD}
    wanted = wanted or {CARD: hashlib.sha256(str(report["card"]).encode()).hexdigest()}
    try:
        marker = atomic.read_json(target / MARKER) or {"files": []}
        gone = [name for name in wanted if not (target / name).exists()]
    except (OSError, ValueError) as error:
        return f"{target} cannot be read ({error})"
    if gone:
        return f"{target / gone[0]} is gone"
    there = {f["path"]: f["sha256"] for f in marker["files"]}
    for name, digest in wanted.items():
        if there.get(name) != digest:
            return f"{target / name} has been replaced by another publication"
    return None


@contextlib.contextmanager
def _refused_by_name(target: Path) -> Iterator[None]:
    try:
        yield
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise ConfigurationError(
            f"{target} cannot be written: {error.strerror}: {error.filename or target}.",
            expected="a folder in which you may create files",
            fix="correct its permissions, or name another one with `publish.path=`",
        ) from error


def _sources(folder: Path) -> dict[str, Path]:
    found = {
        path.name: path
        for path in sorted(folder.iterdir() if folder.is_dir() else ())
        if path.is_file() and any(fnmatch.fnmatch(path.name, p) for p in _FILES)
    }
    missing = [n for n in ("config.json", "tokenizer_config.json") if n not in found]
    if not any(name.endswith(".safetensors") for name in found):
        missing.append("model.safetensors")
    if missing:
        raise StageFailed(
            f"{folder} cannot be published: {', '.join(missing)} not there",
            expected="an export with config, safetensors and tokenizer",
            fix="delete the training stage's folder in the workspace and run the recipe again",
        )
    return found


def _owned(target: Path) -> tuple[OutputFile, ...]:
    """The manifest of what refiner has published at ``target``; empty if nothing is there."""
    if not target.exists():
        return ()
    if target.is_dir():
        marker: dict[str, Any] | None = atomic.read_json(target / MARKER)
        if marker is not None:
            return tuple(from_json(OutputFile, f) for f in marker["files"])
        if not any(target.iterdir()):
            return ()
    raise ConfigurationError(
        f"{target} exists and was not published by refiner",
        expected="a folder of its own for each published model",
        fix="name another one with `publish.path=` or `publish.repo_id=`, or move that one away",
    )


def _described(name: str, path: Path) -> OutputFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return OutputFile(name, path.stat().st_size, digest)


def _unchanged(target: Path, before: dict[str, OutputFile], file: OutputFile) -> bool:
    path = target / file.path
    return before.get(file.path) == file and path.is_file() and path.stat().st_size == file.bytes


def _linked(old: Path, new: Path) -> bool:
    try:
        os.link(old, new)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def _write_marker(folder: Path, manifest: list[OutputFile]) -> None:
    atomic.write_json(folder / MARKER, {"format": 1, "files": to_json(manifest)})


def _swap_in(new: Path, target: Path) -> None:
    """Put ``new`` in the place of ``target``; what was there is under ``new``'s name afterwards."""
    if not target.exists() or not any(target.iterdir()):
        new.rename(target)
    elif not _exchange(new, target):
        # A file system that cannot exchange two names (NFS): gone for an instant, never half.
        old = atomic.temporary_name(target)
        target.rename(old)
        new.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    atomic.sync_folder(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Linux's ``renameat2`` with RENAME_EXCHANGE; False where there is none."""
    library = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    rename = getattr(library, "renameat2", None)
    if rename is None:
        return False
    names = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if rename(*names) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
