"""Weights from GPU to GPU, by vLLM's own routes: NCCL between GPUs, CUDA IPC on one.

In: a live model on a GPU and the servers' control. Out: the servers' workers have its weights. The
protocol is vLLM's (``/init_weight_transfer_engine`` once; then ``/start_weight_update``,
``/update_weights``, ``/finish_weight_update`` for each version), with one tensor after the other
and under the names of the checkpoint.

It needs GPUs. Written after vLLM 0.32's documentation; it has not been run on the machines that
refiner was developed on, and whoever runs it is told by the canary whether the weights are right.
"""

from __future__ import annotations

import base64
import ctypes
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from refiner_core.contract.errors import NoSpaceError, UnsupportedError
from refiner_core.generation.vllm.admin import Admin, Failed

_ID_BYTES = 128
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # ncclDataType_t, ncclRedOp_t
_NCCL_POLL_S = 0.005


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * _ID_BYTES)]


def new_id() -> str:
    """A fresh id of a group, in base64.

    Raises
    ------
    UnsupportedError
        There is no NCCL here.
    """
    made = _Id()
    _check(_library().ncclGetUniqueId(ctypes.byref(made)), "ncclGetUniqueId")
    return base64.b64encode(bytes(made.internal)).decode()


class _Group:
    """Rank 0 of a group; making it waits until all others have joined."""

    def __init__(self, group_id: str, world: int, device: torch.device) -> None:
        self._library, self._device = _library(), device
        self._comm = ctypes.c_void_p()
        unique = _Id()
        ctypes.memmove(ctypes.addressof(unique), base64.b64decode(group_id), _ID_BYTES)
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            joined = self._library.ncclCommInitRank(
                ctypes.byref(self._comm), ctypes.c_int(world), unique, ctypes.c_int(0)
            )
            _check(joined, "ncclCommInitRank")
            warm = torch.zeros(1, device=device)
            torch.cuda.current_stream(device).synchronize()
            summed = self._library.ncclAllReduce(
                *(ctypes.c_void_p(warm.data_ptr()), ctypes.c_void_p(warm.data_ptr())),
                *(ctypes.c_size_t(1), ctypes.c_int(_FLOAT32), ctypes.c_int(_SUM)),
                *(self._comm, ctypes.c_void_p(self._stream.cuda_stream)),
            )
            _check(summed, "ncclAllReduce")
            self._stream.synchronize()

    def broadcast(self, tensor_D: Tensor) -> None:
        """Queue one tensor's bytes for all others; it must stay as it is until :meth:`wait`."""
        with torch.cuda.device(self._device):
            sent = self._library.ncclBroadcast(
                *(ctypes.c_void_p(tensor_D.data_ptr()), ctypes.c_void_p(tensor_D.data_ptr())),
                *(ctypes.c_size_t(tensor_D.nbytes), ctypes.c_int(_UINT8), ctypes.c_int(0)),
                *(self._comm, ctypes.c_void_p(self._stream.cuda_stream)),
            )
            _check(sent, "ncclBroadcast")

    def after_current_stream(self) -> None:
        """Begin only when what the current stream is doing (the update) is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def wait(self, others_fail: Callable[[], str], timeout_s: float) -> None:
        """Wait until all is sent; looks meanwhile whether another member has failed.

        Raises
        ------
        Failed
            One has, or it takes too long. The group is of no use any more.
        """
        done = torch.cuda.Event()
        done.record(self._stream)
        deadline = time.monotonic() + timeout_s
        while not done.query():
            why = others_fail() or ("it took too long" if time.monotonic() > deadline else "")
            if why:
                self.abort()
                raise Failed(why)
            time.sleep(_NCCL_POLL_S)

    def abort(self) -> None:
        """Leave the group, whatever it is doing."""
        if self._comm:
            self._library.ncclCommAbort(self._comm)
            self._comm = ctypes.c_void_p()


def _library() -> Any:
    """The NCCL that torch itself uses: its symbols are there once torch is loaded."""
    if torch.cuda.is_available():
        for name in ("libnccl.so.2", None):
            try:
                found = ctypes.CDLL(name)
                found.ncclGetUniqueId, found.ncclCommInitRank  # noqa: B018 - are they there?
            except (OSError, AttributeError):
                continue
            found.ncclGetErrorString.restype = ctypes.c_char_p
            found.ncclCommInitRank.argtypes = [
                ctypes.POINTER(ctypes.c_void_p),
                ctypes.c_int,
                _Id,
                ctypes.c_int,
            ]
            return found
    raise UnsupportedError(
        "Weights cannot be sent to rollout servers by NCCL: this process has no GPU or no NCCL",
        expected="torch for CUDA, and a GPU",
        fix="set grpo.rollout_server.weight_transfer=reload",
    )


def _check(result: int, call: str) -> None:
    if result:
        said = _library().ncclGetErrorString(ctypes.c_int(result))
        raise Failed(f"{call}: {said.decode(errors='replace') if said else result}")


#: Largest file of weights; host memory holds about one beside what is written.
PART_SIZE = "2GB"
#: What configuration and tokenizer may need beside the weights, bytes.
_SMALL_FILES = 64 << 20


def named_weights(model: Any) -> list[tuple[str, Tensor]]:
    """Every weight under its name in the model; tied ones once."""
    found: list[tuple[str, Tensor]] = []
    seen: set[tuple[int, torch.Size]] = set()
    for name, value in model.state_dict().items():
        key = (value.data_ptr(), value.shape)
        if value.numel() and key in seen:
            continue
        seen.add(key)
        found.append((name, value.detach()))
    return found


def write_folder(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write model, configuration and tokenizer, or nothing under that name.

    Raises
    ------
    NoSpaceError
        It does not fit; says how much it is.
    """
    weights = named_weights(model)
    part = folder.with_name(f".{folder.name}.part")
    for leftover in (part, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    _check_room(weights, folder.parent)
    try:
        part.mkdir(mode=0o700)
        model.save_pretrained(part, max_shard_size=PART_SIZE)
        tokenizer.save_pretrained(part)
        part.rename(folder)
    except (OSError, SafetensorError) as error:
        raise _no_room(weights, folder.parent, str(error)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _check_room(weights: list[tuple[str, Tensor]], folder: Path) -> None:
    needed = sum(value.nbytes for _, value in weights) + _SMALL_FILES
    info = os.statvfs(folder)
    if info.f_bavail * info.f_frsize < needed:
        raise _no_room(weights, folder, f"{info.f_bavail * info.f_frsize / 2**30:.1f} GiB are free")


def _no_room(weights: list[tuple[str, Tensor]], folder: Path, why: str) -> NoSpaceError:
    size = sum(value.nbytes for _, value in weights) / 2**30
    return NoSpaceError(
        f"New weights for the rollout servers ({size:.2f} GiB) cannot be written to {folder}: "
        f"{why}",
        expected="room in memory for two versions of the weights",
        fix="set grpo.rollout_server.weights_dir to a folder with more room, or give the job more "
        "memory (grpo.resources.memory_gb): what lies in /dev/shm counts as memory",
    )


_POLL_S = 0.05
#: Opens the channel over which weights come (once).
_BEGIN = "/init_weight_transfer_engine"
T = TypeVar("T")


def open_transfer(kind: Literal["nccl", "ipc"], timeout_s: float) -> Transfer:
    """The way of that name.

    Raises
    ------
    UnsupportedError
        This process has no GPU.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"grpo.rollout_server.weight_transfer={kind} sends weights from GPU to GPU, and this "
            "process has none",
            expected="a job with GPUs (grpo.resources.gpus)",
            fix="set grpo.rollout_server.weight_transfer=reload",
        )
    return _NcclTransfer(timeout_s) if kind == "nccl" else _IpcTransfer()


class _NcclTransfer:
    """This process is rank 0 of one group; each worker of each server is one of the others."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._group: _Group | None = None

    def send(self, model: Any, admins: Sequence[Admin]) -> None:
        """Broadcast every weight; servers receive them in the same order."""
        weights = [(name, value.contiguous()) for name, value in named_weights(model)]
        if self._group is None:
            self._group = self._open(model.device, admins)
        group = self._group
        for admin in admins:
            admin.post("/start_weight_update")
        calls = _side_by_side(admins, lambda admin: _receive(admin, _described(weights)))
        group.after_current_stream()
        for _, value in weights:
            group.broadcast(value)
        group.wait(lambda: _failure(calls), self._timeout_s)
        for call in calls:
            call.result()
        for admin in admins:
            admin.post("/finish_weight_update", {})

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _open(self, device: torch.device, admins: Sequence[Admin]) -> _Group:
        sizes = [admin.world_size() for admin in admins]
        world, group_id = 1 + sum(sizes), new_id()
        offsets = {id(a): 1 + sum(sizes[:place]) for place, a in enumerate(admins)}

        def join(admin: Admin) -> None:
            offset = offsets[id(admin)]
            place = {"rank_offset": offset, "world_size": world, "nccl_unique_id_b64": group_id}
            admin.post(_BEGIN, {"init_info": place})

        calls = _side_by_side(admins, join)
        making = _in_background(lambda: _Group(group_id, world, device))
        while not making.done():
            if why := _failure(calls):
                raise Failed(f"a rollout server did not join the group: {why}")
            wait([making], timeout=_POLL_S)
        for call in calls:
            call.result()
        return making.result()


class _IpcTransfer:
    """Servers on this process's own GPU open its memory and copy from it."""

    def __init__(self) -> None:
        self._opened = False

    def send(self, model: Any, admins: Sequence[Admin]) -> None:
        """Hand out the places of all weights; they stay as they are until all have copied them."""
        from torch.multiprocessing.reductions import reduce_tensor

        weights = [(name, value.contiguous()) for name, value in named_weights(model)]
        gpu = str(torch.cuda.get_device_properties(model.device).uuid)
        torch.cuda.current_stream(model.device).synchronize()
        # One set of handles per server: each is counted as opened and closed once.
        for admin in admins:
            handles = [{gpu: reduce_tensor(value)[1]} for _, value in weights]
            if not self._opened:
                admin.post(_BEGIN, {"init_info": {"packed": False}})
            admin.post("/start_weight_update")
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            _receive(admin, {**_described(weights), "ipc_handles_pickled": pickled})
            admin.post("/finish_weight_update", {})
        self._opened = True
        torch.cuda.ipc_collect()

    def close(self) -> None:
        """Servers that are new must hear of it again."""
        self._opened = False


#: Either way to send weights to servers that run. ``send`` raises :class:`Failed` where a server
#: lacks them: nothing is known of any server then. After ``close`` the next one opens a channel.
Transfer = _NcclTransfer | _IpcTransfer


def _described(weights: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """Names, and types and shapes in their order."""
    types = [str(value.dtype).removeprefix("torch.") for _, value in weights]
    shapes = [list(value.shape) for _, value in weights]
    return {"names": [name for name, _ in weights], "dtype_names": types, "shapes": shapes}


def _receive(admin: Admin, described: dict[str, Any]) -> None:
    """Have a server receive weights; it answers when they are there."""
    admin.post("/update_weights", {"update_info": described})


def _side_by_side(admins: Sequence[Admin], step: Callable[[Admin], None]) -> list[Future[None]]:
    """Begin a call on each."""
    return [_in_background(partial(step, admin)) for admin in admins]


def _in_background(work: Callable[[], T]) -> Future[T]:
    """Do it in a thread that the end of the process does not wait for, should it hang."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="refiner-transfer", daemon=True).start()
    return future


def _failure(calls: Sequence[Future[None]]) -> str:
    for call in calls:
        if call.done() and (error := call.exception()) is not None:
            return str(error)
    return ""
