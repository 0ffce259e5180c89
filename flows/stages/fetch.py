"""The `fetch` stage: downloads a recipe's Hub repositories into the Hub client's cache.

In: the sources of a plan that begin with ``hub:``. Out: snapshots at the wanted revisions in the
normal cache (``HF_HOME``), which the stages after it read offline, and a report with their sizes.
Existing files are not downloaded again, and a partial one is resumed, so it may be repeated.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flows.stages.work import StageWork
from infra.store import atomic
from infra.store.atomic import is_no_space, no_space_error
from refiner_core.contract.config import ModelConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, RefinerError
from refiner_core.contract.kinds.serving import JUDGE_WEIGHTS
from refiner_core.contract.protocols import configs_under, protocol_name, without_protocol
from refiner_core.contract.records import picked
from refiner_core.contract.types import Progress
from refiner_core.generation.load import resolve_ref

log = logging.getLogger(__name__)

_REPORT = "fetched.json"
#: The same weights in formats that are not used here.
_NOT_READ = ("*.onnx", "*.msgpack", "*.h5", "*.ot", "*.gguf", "original/*", "onnx/*", "flax_*")


class FetchError(RefinerError, RuntimeError):
    """A download failed; the next attempt continues with the missing files."""

    resumable = True


@dataclass(frozen=True)
class _Repository:
    """One repository to fetch."""

    role: str
    repo_id: str
    revision: str
    kind: Literal["model", "dataset"]
    split: str = ""


def run_fetch(work: StageWork) -> dict[str, Any]:
    """Download models and data sets of a Hub into this machine's cache.

    Raises
    ------
    ConfigurationError
        There is no such repository or revision, or this user has no access.
    NoSpaceError
        The cache's disk is full; downloaded files are kept, and the next attempt continues.
    Interrupted
        A stop was requested between two repositories.
    """
    io, wanted = work.io, [_wanted(work.config, role) for role in work.spec.sources]
    fetched: list[dict[str, Any]] = []
    for number, repository in enumerate(wanted):
        if io.should_stop():
            raise Interrupted(
                f"Fetching stopped on request after {number} of {len(wanted)} repositories",
                fix="run the same command again; downloaded files are kept",
            )
        io.progress(Progress(number, len(wanted), f"fetching {repository.repo_id}"))
        log.info("fetching %s %s@%s", repository.kind, repository.repo_id, repository.revision)
        folder = _snapshot(repository)
        fetched.append(_described(repository, folder))
        log.info("%s: %d bytes in %s", repository.repo_id, fetched[-1]["bytes"], folder)
    io.progress(Progress(len(wanted), len(wanted), "fetched"))
    atomic.write_json(work.output_dir / _REPORT, {"fetched": fetched})
    return {"fetched": fetched, "bytes": sum(f["bytes"] for f in fetched)}


def local_model(config: ModelConfig) -> str:
    """Folder of the recipe's base model; for one of a Hub, the snapshot in the cache.

    Raises
    ------
    ConfigurationError
        It is not in the cache.
    """
    resolved = resolve_ref(config.name_or_path)
    if Path(resolved).is_dir():
        return resolved
    from huggingface_hub import snapshot_download

    try:
        return str(
            snapshot_download(
                resolved,
                revision=config.revision,
                local_files_only=True,
                ignore_patterns=list(_NOT_READ),  # else the ignored files count as missing
            )
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"The model {resolved}@{config.revision} is not in the Hub cache of this machine",
            expected="the download of the `fetch` stage",
            fix="set HF_HOME to the cache that it used, or run "
            f"`hf download {resolved} --revision {config.revision}`",
        ) from error


def _wanted(config: RecipeConfig, source: str) -> _Repository:
    """Repository of a source (``model``, ``data.rl@held-out-v1``)."""
    role, protocol = without_protocol(source), protocol_name(source)
    if protocol:
        config = configs_under(config)[protocol]
    model, data, judge = config.model, config.data, config.judge
    weights = {
        "model": (model.name_or_path, model.revision),
        "tokenizer": (str(model.tokenizer_name_or_path), "main"),
        JUDGE_WEIGHTS: (judge.model, judge.revision or "main"),
    }
    if role in weights:
        return _Repository(source, *weights[role], "model")
    which = role.removeprefix("data.")
    path, revision = getattr(data, f"{which}_path"), getattr(data, f"{which}_revision")
    return _Repository(source, path, revision, "dataset", getattr(data, f"{which}_split"))


def _snapshot(wanted: _Repository) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = Path(
            snapshot_download(
                wanted.repo_id,
                repo_type=wanted.kind,
                revision=wanted.revision,
                ignore_patterns=list(_NOT_READ) if wanted.kind == "model" else None,
            )
        )
        if wanted.kind == "dataset":  # `datasets` has a cache of its own: fill it, too
            from datasets import load_dataset

            load_dataset(wanted.repo_id, split=wanted.split, revision=wanted.revision)
    except (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError) as error:
        raise ConfigurationError(
            f"The Hub refuses {wanted.kind} {wanted.repo_id}@{wanted.revision}: "
            f"{type(error).__name__}",
            expected="a repository and revision that exist and that you may read",
            fix="check the name and revision, ask for access, or log in (`hf auth login`)",
        ) from error
    except RefinerError:
        raise
    except Exception as error:  # the client raises OS, HTTP, value and its own errors alike
        if is_no_space(error, _cache()):
            raise no_space_error(_cache(), f"fetching {wanted.repo_id}", error) from error
        why = (str(error).strip() or "no reason given").splitlines()[0]
        raise FetchError(
            f"{wanted.repo_id}@{wanted.revision} could not be fetched ({type(error).__name__}: "
            f"{why})",
            expected="a node that reaches the Hub",
            fix="run the same command again with a network; downloaded files are kept",
        ) from error
    return folder


def _described(wanted: _Repository, folder: Path) -> dict[str, Any]:
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    size = sum(p.stat().st_size for p in files)
    return {
        **{"source": wanted.role, **picked(wanted, "repo_id", "kind", "revision")},
        **{"commit": folder.name, "files": len(files), "bytes": size, "folder": str(folder)},
    }


def _cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    return folder
