"""Caches of compilers, on the node's own disk.

In: the environment of a job. Out: the same, with the caches that the user has not placed in a
folder of this user alone on this node: Triton, Inductor, vLLM and CUDA compile for minutes, and
keep the result in the home folder by default, which has a quota and is slow on a cluster. All of
them write under a temporary name and rename, so jobs of one node share them.

A cache holds code that is run: a folder that another user has made, or could write to, is not used.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from infra.process.watchdog import is_private

log = logging.getLogger(__name__)

#: Settings of caches of compiled code, and the folder of each.
COMPILE_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "CUDA_CACHE_PATH": "cuda",
}


def node_caches() -> Path:
    """Folder of this user's caches on this node."""
    return Path(tempfile.gettempdir()) / f"refiner-caches-{os.getuid()}"


def use_node_caches(settings: MutableMapping[str, str] = os.environ) -> None:
    """Place the caches of compiled code that have no place yet on this node's own disk."""
    parent = node_caches()
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        log.warning("compilers' caches stay in their usual places: %s", error)
        return
    if not is_private(str(parent)):
        log.warning("compilers' caches stay in their usual places: %s is not ours alone", parent)
        return
    for name, folder in COMPILE_CACHES.items():
        settings[name] = settings.get(name) or str(parent / folder)
