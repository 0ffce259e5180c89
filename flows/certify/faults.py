"""Planted faults: each has to be named rightly, and none may cost what was saved.

In: an order and a scratch folder. Out: checks of a loss that is not finite, of memory that runs
out, of a rank that hangs, and of a worker that is killed with SIGKILL and goes on.

NaN and memory end a real training in this process, and the error is classified as a worker would.
The hang and the kill are real runs: an orchestrator, a worker and ranks of their own. One rank is
stopped (SIGSTOP), as one that waits for ever in a collective; the orchestrator has to find it hung,
and to bring the stage to its end with another attempt.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file

from flows.certify.rank import short_sft
from flows.certify.work import Order, check, open_io, random_model, recipe, write_rows
from flows.proving.planning import Asked, plan_proofs
from flows.proving.runs import Room, run_recipe_in
from flows.proving.work import prove_resume
from infra.jobs.failures import classify
from infra.ranks.settings import ORDER
from infra.store.workspace import Workspace
from refiner_core.contract.proofs import CertifiedCheck
from refiner_core.training.sft import train_sft

#: The tiny recipe, as little of it as hangs and dies.
SMALL = (
    "seed=0",
    "data.synthetic_sft_rows=200",
    "data.synthetic_rl_rows=40",
    "sft.pack_length=512",
)
_GIB = 2**30
_LENGTHS = [40, 60, 80, 100] * 8


def fault_checks(order: Order, folder: Path) -> Iterator[CertifiedCheck]:
    """Planted faults but for the hang, the quick ones first."""
    write_rows(folder / "rows", _LENGTHS)
    yield _not_finite(order, folder)
    yield _out_of_memory(order, folder)
    yield _killed(order, folder)


def hang_checks(order: Order, folder: Path) -> Iterator[CertifiedCheck]:
    """The planted hang, which mostly waits."""
    yield _hang(order, folder)


def _named(name: str, wanted: str, act: Callable[[], object]) -> CertifiedCheck:
    try:
        act()
    except Exception as error:
        found = classify(error)
        return check(
            *(name, wanted in (found.failure, type(error).__name__)),
            f"planted, and named {found.failure}: {str(error).splitlines()[0][:160]}",
        )
    return check(name, False, f"planted, and the training ended as if nothing were: not {wanted}")


# ---------------------------------------------------------------- in this process


def _not_finite(order: Order, folder: Path) -> CertifiedCheck:
    small = replace(order, model="tiny", checkpointing=False)
    model = random_model(small, folder / "nan-model")
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.up_proj.weight"))
    weights[name][0, 0] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return _named(
        *("planted loss that is not finite", "NotFiniteError"),
        lambda: _train(small, folder / "nan", folder / "rows", str(model)),
    )


def _out_of_memory(order: Order, folder: Path) -> CertifiedCheck:
    """Packs of many rows on a device that has next to nothing left."""
    small = replace(order, model="tiny", checkpointing=False)
    model = random_model(small, folder / "model")
    rows = write_rows(folder / "long-rows", [2048] * 32)

    def act() -> None:
        _train(small, folder / "oom", rows, str(model), pack=1 << 16)

    name = "planted out-of-memory"
    if order.gpus:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, _GIB / 2 / total))
        try:
            return _named(name, "gpu_out_of_memory", act)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + _GIB // 2, limits[1]))
    try:
        return _named(name, "out_of_memory", act)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _train(order: Order, place: Path, rows: Path, model: str, pack: int = 256) -> None:
    config = short_sft(recipe(order))
    config = replace(config, sft=replace(config.sft, pack_length=pack))
    train_sft(
        config, data_dir=rows, model_ref=model, output_dir=place / "output", io=open_io(place)
    )


# ---------------------------------------------------------------- as real runs


def _overrides(order: Order, folder: Path) -> tuple[str, ...]:
    return (
        *SMALL,
        f"workspace={folder}",
        f"sft.resources.gpus={min(order.gpus, 1)}",
        f"model.dtype={order.dtype}",
        "dispatch.nice=0",
    )


def _killed(order: Order, folder: Path) -> CertifiedCheck:
    """`refiner prove-resume` of SFT, once killed."""
    asked = Asked(
        "tiny",
        _overrides(order, folder / "killed"),
        stage="sft",
        steps=8,
        interruptions=1,
        how="kill",
    )
    [proof] = prove_resume(plan_proofs(asked))
    largest = max((c.largest or 0.0 for c in proof.comparisons), default=0.0)
    differing = [c.quantity for c in proof.comparisons if c.differing]
    return check(
        *("kill -9 and resume", proof.verdict != "diverged"),
        f"{proof.verdict}; {len(proof.comparisons)} quantities compared"
        + (f", {', '.join(differing)} differ by {largest:.2g} at most" if differing else "")
        + f" ({proof.tolerance:g} allowed)",
        largest=largest,
        tolerance=proof.tolerance,
    )


def _hang(order: Order, folder: Path) -> CertifiedCheck:
    """A rank that does nothing any more, under a real orchestrator. Ranks of a node with one GPU
    are on its CPU: two may not share a GPU."""
    on_gpus = order.gpus >= 2
    place = folder / "hung"
    overrides = (
        *_overrides(order, place),
        f"sft.resources.gpus={2 if on_gpus else 0}",
        f"model.dtype={order.dtype if on_gpus else 'float32'}",
        "sft.nproc_per_node=2",
        "sft.gradient_accumulation_steps=2",
        "sft.max_train_steps=60",
        "sft.save_freq=10",
        "stages=[data,sft]",
        "tracking.wandb=disabled",
        "dispatch.hung_after_s=20",
        "dispatch.retries.hung=5",  # a slow start may look like one, too
    )
    stopper = _Stopper(place / "runs")
    stopper.start()
    began = time.monotonic()
    try:
        run_recipe_in(
            Room.make(place / "runs"),
            Asked("tiny"),
            overrides,
            name="hang",
            tell=lambda line: None,
        )
    finally:
        stopper.leave()
    workspace = Workspace.read_only(place / "runs")
    [stage] = [i for i in workspace.stage_ids() if i.startswith("sft")]
    record = workspace.read_record(stage)
    attempts = record.attempts if record is not None else ()
    named = [a.outcome.failure for a in attempts if a.outcome is not None and a.outcome.failure]
    return check(
        *("planted hang", stopper.stopped and "hung" in named and len(attempts) > 1),
        f"a stopped rank was named {named[0] if named else 'nothing'}; the stage ended with "
        f"attempt {len(attempts)} after {time.monotonic() - began:.0f} s",
        attempts=len(attempts),
    )


class _Stopper(threading.Thread):
    """Stops the last rank of the first attempt once it has trained a step."""

    def __init__(self, workspace: Path) -> None:
        super().__init__(name="stopper", daemon=True)
        self._workspace, self._left = workspace, threading.Event()
        self.stopped = False

    def leave(self) -> None:
        """Stop nobody any more."""
        self._left.set()
        self.join()

    def run(self) -> None:
        """Look for the rank until it is stopped."""
        while not self._left.wait(0.05) and not self.stopped:
            if any(self._workspace.glob("stages/sft-*/attempts/*/metrics.jsonl")):
                self._stop()

    def _stop(self) -> None:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if process.uids().real != os.getuid():
                    continue
                given = process.environ()
                if given.get("RANK") == "1" and str(self._workspace) in given.get(ORDER, ""):
                    process.send_signal(signal.SIGSTOP)
                    self.stopped = True
