"""A group of NCCL that is apart from torch's: the trainer and the workers of its rollout servers.

In: the library that torch has loaded. Out: a communicator in which this process is rank 0. vLLM's
workers join by an id that goes to them over HTTP (``nccl_unique_id_b64``), so that nothing of vLLM
is needed here; both sides then make one warm-up sum, as vLLM's workers do after they have joined.

It needs GPUs. Written after NCCL's public C interface and vLLM 0.32; it has not been run on the
machines that refiner was developed on.
"""

from __future__ import annotations

import base64
import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from refiner_core.contract.errors import UnsupportedError

_ID_BYTES = 128
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # ncclDataType_t, ncclRedOp_t
_POLL_S = 0.005


class NcclFailed(Exception):
    """A call of the library, or a member of the group, failed."""


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


class Group:
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
        NcclFailed
            One has, or it takes too long. The group is of no use any more.
        """
        done = torch.cuda.Event()
        done.record(self._stream)
        deadline = time.monotonic() + timeout_s
        while not done.query():
            why = others_fail() or ("it took too long" if time.monotonic() > deadline else "")
            if why:
                self.abort()
                raise NcclFailed(why)
            time.sleep(_POLL_S)

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
        raise NcclFailed(f"{call}: {said.decode(errors='replace') if said else result}")
