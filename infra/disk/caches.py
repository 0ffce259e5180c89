"""Caches that fill the same quota: found by environment variables or paths, never by guessing.

In: ``disk.watch_caches``. Out: one :class:`~infra.disk.usage.Item` per thing that may be deleted
and would only be fetched or compiled again. Tokens, settings and runs that were not uploaded yet
are left out, and so is a folder that nothing marks as a cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from infra.disk.usage import Item, size_of
from infra.store.layout import Layout

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: What is a cache inside HF_HOME; the rest are tokens and settings.
_HF_PARTS = ("hub", "datasets", "xet", "assets")
_TAG = "CACHEDIR.TAG"


def find_caches(names: Iterable[str], layout: Layout) -> list[Item]:
    """What lies in the caches that are watched."""
    found: dict[Path, Item] = {}
    for name in names:
        text = os.environ.get(name, "") if _VARIABLE.fullmatch(name) else name
        if not text:
            continue
        folder = Path(text).expanduser().absolute()
        if not folder.is_dir() or _is_too_much(folder, layout):
            continue
        for path in _parts(name, folder):
            found[path] = Item(path, "caches", size_of(path))
    return list(found.values())


def _parts(name: str, folder: Path) -> Iterator[Path]:
    if name == "HF_HOME":
        yield from (folder / part for part in _HF_PARTS if (folder / part).is_dir())
    elif name == "WANDB_DIR":
        # Only what `wandb sync` has marked as uploaded.
        for mark in sorted(folder.glob("wandb/*run-*/*.wandb.synced")):
            yield mark.parent
    elif "cache" in folder.name.lower() or name.endswith("_CACHE_DIR") or (folder / _TAG).exists():
        yield from sorted(folder.iterdir())


def _is_too_much(folder: Path, layout: Layout) -> bool:
    """A folder that holds more than a cache: the home, this folder, a workspace, or one above."""
    for kept in (Path.home(), Path.cwd(), layout.control, layout.data):
        if kept.is_relative_to(folder) or folder.is_relative_to(layout.stages):
            return True
    return False
