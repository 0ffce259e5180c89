"""Signs of life of one rank, from a thread of its own.

In: this process's :data:`~refiner_core.training.pulse.PULSE`. Out: every two seconds an event for
the worker with its counts and, once its stacks were asked for, the last NCCL collective by NCCL's
flight recorder. Other processes of this user can read the stacks of this one.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
from contextlib import suppress
from typing import Any

from infra.host.processes import host_name
from infra.process.stacks import offer_stacks, was_asked
from infra.ranks.messages import tell
from refiner_core.training.pulse import PULSE

_EVERY_S = 2.0


def start_beats(rank: int) -> None:
    """Send counts until this process ends."""
    offer_stacks()
    threading.Thread(target=_send, args=(rank,), name="beats", daemon=True).start()


def _send(rank: int) -> None:
    own = {"event": "beat", "rank": rank, "host": host_name(), "pid": os.getpid()}
    own["node"] = os.environ.get("SLURMD_NODENAME") or own["host"]
    while True:
        tell({**own, **PULSE.to_json(), **_nccl()})
        time.sleep(_EVERY_S)


def _nccl() -> dict[str, Any]:
    """The last NCCL collective of this rank; empty without NCCL. The recorder is read only once
    there is a reason: it stops nothing, but copies a few thousand entries."""
    if not PULSE.nccl:
        return {}
    if not was_asked():
        return {"nccl": {}}
    entries: list[dict[str, Any]] = []
    with suppress(AttributeError, ValueError, KeyError, RuntimeError):  # by the version of torch
        recorder = importlib.import_module("torch._C._distributed_c10d")
        entries = json.loads(recorder._dump_nccl_trace_json(True, False))["entries"]
    last = entries[-1] if entries else {}
    seq = last.get("collective_seq_id", last.get("seq_id", 0))
    return {"nccl": {"enqueued": seq, "name": last.get("profiling_name", "")}}
