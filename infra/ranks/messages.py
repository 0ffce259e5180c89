"""Settings, events and errors between a worker and its ranks.

To ranks: their environment, on the first node of a stage and on the others, and their visible GPUs.
Placements count GPUs within those of the job on a node, as listed in ``CUDA_VISIBLE_DEVICES``;
ranks see those of the trainer, all alike and in order, so that a rank's local number is its GPU's.
The job's own list is kept (:data:`JOB_GPUS`) for the servers that a rank starts beside it.

From ranks and their agents: an event, as one marked line of their output. The mark is a random word
of each launch, so that no other output looks like an event; ranks have no other channel that
reaches the worker from every node, in order, and with a full disk. An exception is rebuilt with the
same class, words, system error number and causes, so that :func:`infra.jobs.failures.classify` and
a caller's ``except`` see no difference. Its traceback is attached as a note, for logs only. Errors
of the contract, of our packages and of Python are rebuilt as such; of any other class (torch's)
only the name is kept: it becomes a :class:`RankError` of that name.

Every two seconds, a thread of each rank sends its counts
(:data:`~refiner_core.training.pulse.PULSE`) and, once its stacks were asked for, the last NCCL
collective by NCCL's flight recorder. Other processes of this user can read its stacks.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from infra.host.gpus import VISIBLE
from infra.host.processes import host_name
from infra.jobs.failures import traceback_signature
from infra.process.stacks import offer_stacks, was_asked
from refiner_core.contract.errors import RefinerError, UnsupportedError
from refiner_core.contract.placement import Placement
from refiner_core.contract.records import from_json
from refiner_core.training.pulse import PULSE

#: The job's ``CUDA_VISIBLE_DEVICES``; unset if that was unset.
JOB_GPUS = "REFINER_JOB_GPUS"

#: Setting of ranks: their order, as JSON.
ORDER = "REFINER_RANKS_ORDER"


_OURS = ("refiner_core", "infra", "flows")
_CAUSES = 5
#: Limits of texts, because an event is a single line of output.
_TEXT_LIMIT, _TRACEBACK_LIMIT = 8_000, 24_000
#: Setting of agents and ranks: the mark.
MARK = "REFINER_RANKS_MARK"
#: Readers cut lines (:mod:`infra.external.process`), so an event is shorter.
_LIMIT = 60_000
_BEAT_S = 2.0


def trainer_settings(gpus: Sequence[int], given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Settings of a node's ranks; without ``gpus`` they train on the CPU.

    Raises
    ------
    UnsupportedError
        The job has fewer.
    """
    if not gpus:
        return {}
    before = {JOB_GPUS: given[VISIBLE]} if VISIBLE in given else {}
    return {VISIBLE: visible(gpus, given), **before}


def visible(gpus: Sequence[int], given: Mapping[str, str] = os.environ) -> str:
    """``CUDA_VISIBLE_DEVICES`` for some of a job's GPUs, in the job or in one of its ranks.

    Raises
    ------
    UnsupportedError
        The job has fewer.
    """
    names = given.get(JOB_GPUS, given.get(VISIBLE))
    if names is None:
        return ",".join(map(str, gpus))
    known = [name.strip() for name in names.split(",") if name.strip()]
    if max(gpus, default=-1) >= len(known):
        raise UnsupportedError(
            f"This job uses GPU number {max(gpus)} of its node, but was given {len(known)} "
            f"({VISIBLE}={names})",
            expected="as many GPUs as the stage's resources.gpus",
            fix=f"unset {VISIBLE}, or lower resources.gpus",
        )
    return ",".join(known[number] for number in gpus)


def rank_settings(placement: Placement, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of ranks on this node, in addition to the worker's."""
    settings = {
        # A hung or dead partner ends a NCCL rank, instead of keeping its GPU busy for ever.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": given.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "PYTHONUNBUFFERED": "1",
        **trainer_settings(placement.trainer_gpus, given),
    }
    if not placement.trainer_gpus:
        settings["DS_ACCELERATOR"] = "cpu"
    if placement.nodes == 1:  # closed to other machines
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        settings |= {name: "lo" for name in names if name not in given}
    return settings


def node_settings(order: Mapping[str, str]) -> dict[str, str]:
    """:func:`rank_settings` from the order of a node's ranks alone."""
    return rank_settings(from_json(Placement, json.loads(order[ORDER])["placement"]))


class _RankError(RuntimeError):
    """An error of a class that is unknown in this process."""


def encode(error: BaseException, causes: int = _CAUSES) -> dict[str, Any]:
    """The error as a JSON value."""
    value: dict[str, Any] = {
        "module": type(error).__module__,
        "name": type(error).__qualname__,
        "text": str(error)[:_TEXT_LIMIT],
    }
    if (rank := getattr(error, "rank", None)) is not None:
        value["rank"] = rank
    if isinstance(error, RefinerError):
        value["parts"] = [error.what, error.expected, error.fix]
    if isinstance(error, OSError):
        name = None if error.filename is None else str(error.filename)
        value |= {"errno": error.errno, "strerror": error.strerror, "filename": name}
    if causes == _CAUSES:
        value["signature"] = traceback_signature(error)
        text = "".join(traceback.format_exception(error))
        value["traceback"] = text[-_TRACEBACK_LIMIT:]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and causes:
        value["cause"] = encode(cause, causes - 1)
    return value


def decode(value: dict[str, Any], where: str = "") -> Exception:
    """The error rebuilt; ``where`` names the origin of its traceback in a note."""
    kind = _class(value["module"], value["name"])
    error = _made(kind, value)
    vars(error).update({name: value[name] for name in ("rank", "signature") if name in value})
    if text := value.get("traceback"):
        error.add_note(f"{where or 'There'}:\n{text.rstrip()}")
    if "cause" in value:
        error.__cause__ = decode(value["cause"])
    return error


def _made(kind: type[Exception], value: dict[str, Any]) -> Exception:
    if issubclass(kind, RefinerError):
        what, expected, fix = value.get("parts") or (value["text"], "", "")
        ours = kind.__new__(kind)
        RefinerError.__init__(ours, what, expected=expected, fix=fix)
        if isinstance(ours, OSError):
            ours.errno = value.get("errno")
        return ours
    if issubclass(kind, OSError) and value.get("errno") is not None:
        name = value.get("filename")
        return kind(value["errno"], value.get("strerror") or "", *([name] if name else []))
    try:
        return kind(value["text"])
    except Exception:  # a class that needs other arguments than words (UnicodeDecodeError)
        return _unknown(kind.__name__, kind.__module__)(value["text"])


def _class(module: str, name: str) -> type[Exception]:
    found: Any = None
    if module == "builtins":
        found = getattr(builtins, name, None)
    elif module.partition(".")[0] in _OURS:
        found = getattr(importlib.import_module(module), name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    return _unknown(name.rpartition(".")[2], module)


def _unknown(name: str, module: str) -> type[_RankError]:
    return type(name, (_RankError,), {"__module__": module})


def event_line(mark: str, value: dict[str, Any]) -> str:
    """The line for an event."""
    text = json.dumps(value)
    if len(text) > _LIMIT:
        text = json.dumps(_without_length(value))
    return f"{mark} {text}"


def read_event(mark: str, line: str) -> dict[str, Any] | None:
    """The event in a line; None for any other line."""
    if not line.startswith(f"{mark} "):
        return None
    try:
        value = json.loads(line.removeprefix(f"{mark} "))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def tell(value: dict[str, Any]) -> None:
    """Send an event to the worker; without one, nothing happens."""
    if mark := os.environ.get(MARK):
        sys.stdout.flush()
        sys.stderr.flush()
        # One write, because other threads print, too.
        os.write(1, f"\n{event_line(mark, value)}\n".encode())


def tell_error(rank: int, error: BaseException) -> None:
    """Send the error that ends this rank."""
    tell({"event": "error", "rank": rank, "error": encode(error)})


def _without_length(value: dict[str, Any]) -> dict[str, Any]:
    """The same error, shortened: without its causes, its traceback cut."""
    error = {k: v for k, v in value.get("error", {}).items() if k != "cause"}
    error["text"], error["traceback"] = error["text"][:4000], error["traceback"][-12_000:]
    error.pop("parts", None) if len(json.dumps(error)) > _LIMIT else None
    return {**value, "error": error}


# ---------------------------------------------------------------- signs of life


def start_beats(rank: int) -> None:
    """Send counts until this process ends."""
    offer_stacks()
    threading.Thread(target=_send_beats, args=(rank,), name="beats", daemon=True).start()


def _send_beats(rank: int) -> None:
    own = {"event": "beat", "rank": rank, "host": host_name(), "pid": os.getpid()}
    own["node"] = os.environ.get("SLURMD_NODENAME") or own["host"]
    while True:
        tell({**own, **PULSE.to_json(), **_nccl()})
        time.sleep(_BEAT_S)


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
