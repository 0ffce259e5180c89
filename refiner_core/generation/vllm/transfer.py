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
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from refiner_core.contract.errors import UnsupportedError
from refiner_core.generation.vllm.admin import Admin, Failed
from refiner_core.generation.vllm.nccl import Group, NcclFailed, new_id
from refiner_core.generation.vllm.weights import named_weights

_POLL_S = 0.05
T = TypeVar("T")


class Transfer(Protocol):
    """Sends weights to servers that run."""

    def send(self, model: Any, admins: Sequence[Admin]) -> None:
        """Send all weights; returns when all servers have them.

        Raises
        ------
        Failed
            One of them has not; nothing is known of any of them.
        """
        ...

    def close(self) -> None:
        """Give the channel up; the next :meth:`send` opens another."""
        ...


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
    return NcclTransfer(timeout_s) if kind == "nccl" else IpcTransfer()


class NcclTransfer:
    """This process is rank 0 of one group; each worker of each server is one of the others."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._group: Group | None = None

    def send(self, model: Any, admins: Sequence[Admin]) -> None:
        """Broadcast every weight; servers receive them in the same order."""
        weights = [(name, value.contiguous()) for name, value in named_weights(model)]
        try:
            if self._group is None:
                self._group = self._open(model.device, admins)
            group = self._group
            for admin in admins:
                admin.start_update()
            calls = _side_by_side(admins, lambda admin: admin.update(*_described(weights)))
            group.after_current_stream()
            for _, value in weights:
                group.broadcast(value)
            group.wait(lambda: _failure(calls), self._timeout_s)
            for call in calls:
                call.result()
            for admin in admins:
                admin.finish_update()
        except NcclFailed as error:
            raise Failed(f"sending by NCCL failed: {error}") from error

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _open(self, device: torch.device, admins: Sequence[Admin]) -> Group:
        sizes = [admin.world_size() for admin in admins]
        world, group_id = 1 + sum(sizes), new_id()
        offsets = {id(a): 1 + sum(sizes[:place]) for place, a in enumerate(admins)}

        def join(admin: Admin) -> None:
            offset = offsets[id(admin)]
            admin.begin_transfer(
                {"rank_offset": offset, "world_size": world, "nccl_unique_id_b64": group_id}
            )

        calls = _side_by_side(admins, join)
        making = _in_background(lambda: Group(group_id, world, device))
        while not making.done():
            if why := _failure(calls):
                raise Failed(f"a rollout server did not join the group: {why}")
            wait([making], timeout=_POLL_S)
        for call in calls:
            call.result()
        return making.result()


class IpcTransfer:
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
            names, info = _described(weights)
            if not self._opened:
                admin.begin_transfer({"packed": False})
            admin.start_update()
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            admin.update(names, {**info, "ipc_handles_pickled": pickled})
            admin.finish_update()
        self._opened = True
        torch.cuda.ipc_collect()

    def close(self) -> None:
        """Servers that are new must hear of it again."""
        self._opened = False


def _described(weights: Sequence[tuple[str, Tensor]]) -> tuple[list[str], dict[str, Any]]:
    """Names, and types and shapes in their order."""
    types = [str(value.dtype).removeprefix("torch.") for _, value in weights]
    shapes = [list(value.shape) for _, value in weights]
    return [name for name, _ in weights], {"dtype_names": types, "shapes": shapes}


def _side_by_side(admins: Sequence[Admin], step: Callable[[Admin], None]) -> list[Future[None]]:
    """Begin a call on each."""

    def call(admin: Admin) -> Future[None]:
        return _in_background(lambda: step(admin))

    return [call(admin) for admin in admins]


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
