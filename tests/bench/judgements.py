"""``python -m tests.bench judgements``: the workspace's store with five million judgements in it.

Prints one JSON line: processor time that the store takes when a judge begins, for 4,096 keys in the
middle of a step (a half of them known), and for each judgement that is put; and what that takes in
memory (in the end, and at most) and on the disk.
"""

import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from infra.judgements.store import HEADER, RECORD, WorkspaceStore
from infra.store.provenance import host
from refiner_core.contract.types import StoredJudgement

RECORDS, SEGMENTS, KEYS, PUTS = 5_000_000, 5, 4096, 12_800


def main(words: Sequence[str]) -> int:
    """Measure in a process of its own; ``words`` are taken no notice of."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "judgements"
        folder.mkdir()
        known = [key for number in range(SEGMENTS) for key in _fill(folder, number)]
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            found = pool.apply(_measure, (folder, known))
        found["disk_mib"] = sum(p.stat().st_size for p in folder.iterdir()) >> 20
    machine = host()
    named = {"name": "store of judgements", "records": RECORDS, "keys": KEYS}
    print(json.dumps({**named, **found, "machine": machine["cpu"]}), flush=True)
    return 0


def _fill(folder: Path, number: int) -> list[bytes]:
    """One segment; some of its keys."""
    records = np.frombuffer(os.urandom(RECORDS // SEGMENTS * RECORD.itemsize), RECORD).copy()
    records["score"], records["prompt"], records["completion"] = 0.5, 700, 10
    rows = records.view(np.uint8).reshape(-1, RECORD.itemsize)
    records["crc"] = [zlib.crc32(row) for row in np.ascontiguousarray(rows[:, :-4])]
    raw = records.tobytes()
    (folder / f"filled-{number}.sealed").write_bytes(HEADER + raw)
    step = len(raw) // (KEYS // 2 // SEGMENTS + 1) // RECORD.itemsize * RECORD.itemsize
    return [raw[at : at + 16] for at in range(0, len(raw), step)]


def _measure(folder: Path, known: list[bytes]) -> dict[str, Any]:
    before = psutil.Process().memory_info().rss
    with WorkspaceStore(folder, writer="bench", limit_bytes=1 << 30) as store:
        begun = time.process_time()
        assert all(store.get(known))
        first_s = time.process_time() - begun
        times = []
        for _ in range(20):
            keys = known[: KEYS // 2] + [os.urandom(16) for _ in range(KEYS // 2)]
            begun = time.process_time()
            found = store.get(keys)
            times.append(time.process_time() - begun)
            assert sum(f is not None for f in found) == len(known[: KEYS // 2])
        keys = [os.urandom(16) for _ in range(PUTS)]
        begun = time.process_time()
        for key in keys:
            store.put(key, StoredJudgement(1.0, 700, 10))
        store.flush()
        put_s = time.process_time() - begun
        memory = psutil.Process().memory_info().rss - before
    return {
        "first_get_s": round(first_s, 2),
        "get_ms": round(1e3 * statistics.median(times), 2),
        "put_us": round(1e6 * put_s / PUTS, 1),
        "memory_mib": memory >> 20,
        "most_memory_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
        >> 20,
    }
