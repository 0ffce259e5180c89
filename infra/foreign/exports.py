"""What another trainer made, in the layout that publishing and evaluation read.

In: a checkpoint's folder or file. Out: ``output/model`` with its weights, configuration and
tokenizer: as links where the file system has them, else as copies. States of an optimiser and the
like stay behind.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import shutil
from pathlib import Path

from infra.foreign.checkpoints import ForeignCheckpoint, newest_complete
from infra.foreign.weights import damage
from refiner_core.contract.errors import StageFailed

#: What only goes on from; not part of a model.
_STATE = (
    *(
        "optimizer*",
        "scheduler*",
        "rng_state*",
        "trainer_state*",
        "training_args*",
        "random_states*",
    ),
    *("*optim_states*", "scaler*", "zero_to_fp32.py", "latest", "global_step*", ".*"),
)
#: What a model needs beside its weights.
COMPANIONS = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt", "chat_template.*", "*.model", "*.tiktoken"),
)
_NEEDED = ("config.json", "tokenizer_config.json", "*.safetensors")


def find_export(work: Path, exports: str, found: list[ForeignCheckpoint]) -> Path:
    """The folder or file of the final weights.

    Raises
    ------
    StageFailed
        There is none, or it is damaged.
    """
    if exports == "auto":
        newest = newest_complete(found)
        if newest is None:
            raise StageFailed(
                f"The trainer ended well, but left no complete checkpoint in {work}",
                expected="one that command.checkpoints finds and command.complete accepts"
                + (f" (the newest: {found[-1].damage})" if found else ""),
                fix="correct command.checkpoints, or name the folder with command.exports=",
            )
        return newest.path
    path = work / exports
    wrong = damage(path) if path.exists() else "it does not exist"
    if wrong:
        raise StageFailed(
            f"The trainer's export {path} cannot be used: {wrong}",
            expected="whole weights where command.exports says",
            fix="correct command.exports, or look at the trainer's log",
        )
    return path


def make_model(source: Path, target: Path, companions: Path | None = None) -> list[str]:
    """Fill ``target`` with the model at ``source``; returns what it still lacks.

    ``companions`` is where its configuration and tokenizer come from, if ``source`` has none.
    """
    target.mkdir(parents=True, exist_ok=True)
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    for path in files:
        if path.is_file() and not _matches(path.name, _STATE):
            link_or_copy(path, target / path.name)
    if companions is not None and companions.is_dir():
        for path in sorted(companions.iterdir()):
            new = target / path.name
            if path.is_file() and _matches(path.name, COMPANIONS) and not new.exists():
                link_or_copy(path, new)
    return missing_files(target)


def missing_files(model: Path) -> list[str]:
    """What a model folder lacks to be loaded and published."""
    names = [p.name for p in model.iterdir()] if model.is_dir() else []
    return [need for need in _NEEDED if not any(fnmatch.fnmatch(n, need) for n in names)]


def require_whole(model: Path, doing: str) -> None:
    """Refuse a model of another trainer's that lacks what ``doing`` needs.

    Raises
    ------
    StageFailed
        Names what is missing, and where it can come from.
    """
    missing = missing_files(model)
    if not missing:
        return
    there = ", ".join(sorted(p.name for p in model.iterdir())) if model.is_dir() else "nothing"
    raise StageFailed(
        f"The command's model lacks {', '.join(missing)} for {doing} (there: {there})",
        expected="safetensors, config.json and a tokenizer, in the layout of the Hub",
        fix="let the trainer export them (command.exports=FOLDER), or take configuration and "
        "tokenizer from elsewhere with command.companions={model} or command.companions=FOLDER; "
        "weights in another format are to be converted first (save_pretrained)",
    )


def link_or_copy(source: Path, target: Path, *, copy: bool = False) -> bool:
    """A hard link where the file system has them, else a copy; True if it is a link.

    Raises
    ------
    OSError
        There is no room, or it may not be read.
    """
    real = source.resolve()
    if not copy:
        try:
            os.link(real, target)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EEXIST):
                raise
        else:
            return True
    shutil.copyfile(real, target)
    return False


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, p) for p in patterns)
