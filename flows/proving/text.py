"""What a proof looks like on a terminal and in JSON.

In: proofs and plans. Out: lines, and plain values.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from flows.proving.planning import Plans
from refiner_core.contract.proofs import Comparison, Interruption, ResumeProof
from refiner_core.contract.records import to_json

_HOW = {"kill": "kill -9", "stop": "asked to stop"}


def plan_lines(plans: Plans) -> list[str]:
    """What is about to be done."""
    asked = plans.asked
    names = " and ".join(s.kind for s in plans.stages)
    changed = ", ".join(f"{path}={_plain(value)}" for path, value in plans.changed.items())
    lines = [
        f"Proving exact resume of {names} of {asked.recipe}: {asked.steps} steps straight, and "
        f"once more with interruptions: {asked.interruptions} (seed {asked.seed}).",
        f"Changed for it: {changed}",
    ]
    if plans.given:
        lines.append("Taken from the workspace: " + ", ".join(sorted(plans.given)))
    return lines


def interruption_line(found: Interruption) -> str:
    """One interruption, in words."""
    return f"{_HOW[found.how]} in step {found.step} ({found.phase})"


def proof_lines(proof: ResumeProof) -> list[str]:
    """A verdict and what it rests on."""
    lines = [f"{proof.stage}: {proof.verdict}", f"  {summary(proof)}"]
    for found in proof.interruptions:
        resumed = found.resumed_from_step
        went_on = "began anew" if resumed is None else f"went on from step {resumed}"
        lines.append(f"  {interruption_line(found)}, {went_on}")
    lines += [f"  {_compared(c)}" for c in proof.comparisons]
    first = proof.first
    if first is not None:
        at = "at the end" if first.first_step is None else f"at step {first.first_step}"
        lines.append(f"  The first difference, {at}: {first.quantity}, {first.first}")
    return lines


def summary(proof: ResumeProof) -> str:
    """One sentence: how much was tried."""
    count = len(proof.interruptions)
    text = f"{proof.steps} steps, interrupted {count} time{'' if count == 1 else 's'}"
    if count < proof.wanted:
        text += f" ({proof.wanted} wanted; it was over before)"
    if not proof.same_processes:
        text += f", resumed on {proof.resume_processes} processes per node"
        text += f" after {proof.processes}" if proof.processes else ""
    if proof.tolerance:
        text += f", differences up to {proof.tolerance:g} allowed"
    return text


def _compared(found: Comparison) -> str:
    if not found.differing:
        return f"{found.quantity}: {found.compared} compared, all bitwise the same"
    size = "some without a size" if found.largest is None else f"the largest {found.largest:.3g}"
    return f"{found.quantity}: {found.differing} of {found.compared} differ, {size}"


def next_lines(proofs: Sequence[ResumeProof], plans: Plans) -> list[str]:
    """What to do next."""
    asked = plans.asked
    words = shlex.join([asked.recipe, *asked.overrides])
    if any(p.verdict == "diverged" for p in proofs):
        return [
            "Next: look where the first difference stands (the logs of both runs are in the kept "
            "folder), and prove it again after mending it:",
            f"  refiner prove-resume {words} --seed {asked.seed}",
        ]
    return [
        f"Next: `refiner run {words}`; cards of what it trains show this verdict.",
    ]


def proofs_json(proofs: Sequence[ResumeProof]) -> dict[str, Any]:
    """For scripts."""
    return {
        "version": 1,
        "exit_code": exit_code(proofs),
        "proofs": [{**to_json(p), "verdict": p.verdict} for p in proofs],
    }


def exit_code(proofs: Sequence[ResumeProof]) -> int:
    """1 where a stage diverged, else 0."""
    return int(any(p.verdict == "diverged" for p in proofs))


def _plain(value: Any) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)
