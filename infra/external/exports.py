"""Models of other trainers, in the layout that publishing and evaluation read.

In: a checkpoint's folder or file. Out: ``output/model`` with its weights, configuration and
tokenizer: as links if the file system has them, else as copies. Optimizer states and the like are
left out. Links that lead out of the checkpoint are refused, because their targets would be
published.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Iterable, Sequence
from io import BufferedReader
from pathlib import Path

from infra.external.checkpoints import ExternalCheckpoint, damage, newest_complete
from infra.host.files import link
from refiner_core.contract.errors import ConfigurationError, StageFailed

#: Files for resuming only; not part of a model.
_STATE = (
    *("optimizer*", "scheduler*", "rng_state*", "trainer_state*", "training_args*"),
    *("random_states*", "*optim_states*", "scaler*", "zero_to_fp32.py", "latest"),
    *("global_step*", ".*"),
)
#: Files that a model needs beside its weights.
COMPANIONS = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt", "chat_template.*", "*.model", "*.tiktoken"),
)
_NEEDED = ("config.json", "tokenizer_config.json", "*.safetensors")
#: A file with a part of the weights, and what it is loaded by.
_SHARD, _INDEX = "*-of-*.safetensors", "*.safetensors.index.json"
_CHUNK = 4 << 20


def find_export(work: Path, exports: str, found: list[ExternalCheckpoint]) -> Path:
    """The folder or file of the final weights.

    Raises
    ------
    StageFailed
        There is none, or it is damaged.
    """
    if exports == "auto":
        newest = newest_complete(found)
        if newest is not None:
            return newest.path
        last = found[-1].damage if found else "there is none"
        wrong = f"it left no complete checkpoint in {work} (the newest: {last})"
    else:
        path = work / exports
        damaged = damage(path) if path.exists() else "it does not exist"
        if damaged is None:
            return path
        wrong = f"{path}: {damaged}"
    raise StageFailed(
        f"The trainer ended well, but its output cannot be used: {wrong}",
        expected="a checkpoint that command.checkpoints finds and command.complete accepts, or "
        "whole weights where command.exports says",
        fix="correct command.checkpoints or command.exports, or look at the trainer's log",
    )


def model_files(
    source: Path, companions: Path | None = None, *, within: Path | None = None
) -> dict[str, Path]:
    """Name -> file (no link) of the model at ``source`` (a folder, or a file of weights).

    ``companions`` has its configuration and tokenizer, if ``source`` has none; links of ``source``
    may lead to ``within`` (none: itself).

    Raises
    ------
    ConfigurationError
        A link leads elsewhere.
    """
    files: dict[str, Path] = {}
    if source.is_dir():
        for path in source.iterdir():
            if path.is_file() and not matches(path.name, _STATE):
                files[path.name] = _real_file(path, within or source)
    else:
        name = "model.safetensors" if source.suffix == ".safetensors" else source.name
        files[name] = _real_file(source, within or source.parent)
    if companions is not None and companions.is_dir():
        for path in companions.iterdir():
            if path.name not in files and path.is_file() and matches(path.name, COMPANIONS):
                files[path.name] = _real_file(path, companions)
    return files


def _real_file(path: Path, within: Path) -> Path:
    """Path of the file itself; a snapshot in the Hub's cache has links to its blobs."""
    real, home = path.resolve(), within.resolve()
    repository = home.parent.parent
    if home.parent.name == "snapshots" and repository.name.startswith("models--"):
        home = home if real.is_relative_to(home) else repository / "blobs"
    if real.is_relative_to(home):
        return real
    raise ConfigurationError(
        f"{path} is a link that leads out of {within}, to {real}",
        expected="a checkpoint that holds its own files",
        fix="if that file belongs to the model, replace the link by a copy of it, and run "
        "the same command again",
    )


def make_model(source: Path, target: Path, companions: Path | None, *, within: Path) -> list[str]:
    """Fill ``target`` with the model at ``source``; returns what it still lacks. Errors and
    ``within`` as in :func:`model_files`."""
    target.mkdir(parents=True, exist_ok=True)
    for name, path in sorted(model_files(source, companions, within=within).items()):
        if not link(path, target / name):
            copy(path, target / name)
    return missing_in(target)


def missing_in(source: Path, companions: Path | None = None) -> list[str]:
    """Files that the model at ``source`` lacks to be loaded and published."""
    return lacking(model_files(source, companions) if source.exists() else ())


def lacking(names: Iterable[str]) -> list[str]:
    """Patterns of files that a model of these files lacks to be loaded and published."""
    there = [*names]
    needed = [*_NEEDED, *(_INDEX for name in there if matches(name, (_SHARD,)))]
    return [need for need in dict.fromkeys(needed) if not any(matches(n, (need,)) for n in there)]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """True if a name matches one of the patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def require_whole(model: Path, doing: str) -> None:
    """Refuse another trainer's model that lacks what ``doing`` needs.

    Raises
    ------
    StageFailed
        Names what is missing, and its possible sources.
    """
    missing = missing_in(model)
    if not missing:
        return
    there = ", ".join(sorted(p.name for p in model.iterdir())) if model.is_dir() else "nothing"
    raise StageFailed(
        f"The command's model lacks {', '.join(missing)} for {doing} (there: {there})",
        expected="safetensors, config.json and a tokenizer, in the layout of the Hub",
        fix="let the trainer export them (command.exports=FOLDER), or take configuration and "
        "tokenizer from elsewhere with command.companions={model} or command.companions=FOLDER; "
        "convert weights in another format first (save_pretrained)",
    )


def copy(source: Path, target: Path) -> None:
    """Copy a file that is no link.

    Raises
    ------
    OSError
        There is no space, or no permission to read.
    """
    with open_file(source) as reading, target.open("wb") as writing:
        shutil.copyfileobj(reading, writing, _CHUNK)


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading; refuse a link that replaced it.

    Raises
    ------
    OSError
        It is a link, or there is no permission.
    """
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
