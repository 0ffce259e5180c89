"""`python -m tests.bench memory`: the most memory that a GRPO update takes.

Ours (:func:`train_grpo`) and TRL's `GRPOTrainer` on the same rollouts, two steps each, in a process
of its own per side and round: resident memory at its highest, less what was resident when the first
rollouts were there (model loaded, nothing trained; Linux forgets the peak before that). So
gradients, optimiser state, activations and logits count, libraries and weights do not.

Works: fixed lengths; and a vocabulary of 151,936, where logits of the whole batch would take more
than everything else together. MiB; ratio is rival / ours.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.bench.__main__ import in_a_process, machine
from tests.bench.training_work import (
    FixedRollouts,
    Work,
    fixed_rollouts,
    fixed_work,
    make_inputs,
    run_ours,
)

WORKS = {
    "fixed": fixed_work("small"),
    "vocabulary": Work("vocabulary of 151,936", "wide", (64,) * 2, ((128,) * 4,) * 2),
}
STEPS = 2
#: TRL's default, and packs of about as many tokens as that makes: what goes through in one pass.
MICRO_BATCH = 8
PACK_LENGTH = 2048


def main(arguments: list[str]) -> int:
    """Measure all works; with ``one``, a side of a work in this process."""
    if arguments[:1] == ["one"]:
        print(json.dumps(measure(*arguments[1:])))
        return 0
    if not Path("/proc/self/clear_refs").exists():
        print(json.dumps({"name": "memory", "skipped": "needs Linux's /proc/self/clear_refs"}))
        return 0
    for name in WORKS:
        print(json.dumps(compare(name)), flush=True)
    return 0


def compare(name: str) -> dict[str, Any]:
    """A fresh process for each side."""
    found = {side: in_a_process("memory", "one", side, name) for side in ("ours", "trl")}
    tokens = {one["tokens"] for one in found.values()}
    assert tokens == {WORKS[name].response_tokens}, tokens
    ours, rival = found["ours"]["mib"], found["trl"]["mib"]
    return {
        "name": f"peak memory of a GRPO update, {WORKS[name].name}",
        "ours": round(ours, 1),
        "rival": round(rival, 1),
        "ratio": round(rival / ours, 2),
        "unit": "MiB above the loaded model (less is better; ratio = rival / ours)",
        "response_tokens": WORKS[name].response_tokens,
        "machine": machine(),
    }


def measure(side: str, name: str) -> dict[str, Any]:
    """One side in this process."""
    torch.set_num_threads(1)
    work = WORKS[name]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = make_inputs(work, root)
        rollouts = Peak(fixed_rollouts(work, rows).completions)
        if side == "ours":
            done = run_ours(
                *(work, root, root / "ours", STEPS - 1), generator=rollouts, pack_length=PACK_LENGTH
            )
        else:
            from tests.bench.trl_side import run_trl

            done = run_trl(
                *(work, rows, root, root / "trl", STEPS - 1),
                micro_batch=MICRO_BATCH,
                fixed=rollouts,
            )
        return {"mib": rollouts.above_start(), "tokens": done.response_tokens[0]}


class Peak(FixedRollouts):
    """Given rollouts that note, when they are first asked for, how much memory is in use."""

    start_kib = 0

    def began(self) -> None:
        """Forget the peak so far, the first time."""
        if not self.start_kib:
            Path("/proc/self/clear_refs").write_text("5")
            self.start_kib = resident_kib("VmRSS")

    def above_start(self) -> float:
        """MiB between then and the peak since."""
        assert self.start_kib, "no rollouts were asked for"
        return (resident_kib("VmHWM") - self.start_kib) / 1024


def resident_kib(field: str) -> int:
    """A field of this process's status: `VmRSS` (now) or `VmHWM` (at most), KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/self/status")
