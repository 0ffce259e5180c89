"""A planned proof, carried out.

::

    straight run ──┬─> interrupted run of SFT  ──> compared ──> proofs/sft-…/proof.json
                   └─> interrupted run of GRPO ──> compared ──> proofs/grpo-…/proof.json

In: :class:`~flows.proving.planning.Plans`. Out: a :class:`ResumeProof` per stage, recorded. Stages
before the one that is interrupted are those of the straight run, so that each is judged by itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.proving.planning import OneStage, Plans, interruption_line
from flows.proving.runs import Interrupter, Room, Tell, as_they_were, run_recipe_in, share_stages
from infra.store import atomic
from infra.store.checkpoints import CheckpointStore
from infra.store.provenance import host, keep_scratch, new_scratch, versions, write_proof
from infra.store.traces import list_rollouts, read_metrics, read_rollouts
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.errors import StageFailed, WorkspaceError
from refiner_core.contract.proofs import PROOF_VERSION, Comparison, Interruption, ResumeProof


@dataclass(frozen=True)
class Trained:
    """A finished training, as far as it is compared."""

    workspace: Workspace
    stage_id: str

    @property
    def attempt(self) -> int:
        """The one that finished, whose files tell the whole story."""
        result = self.workspace.read_result(self.stage_id)
        if result is None:
            raise _gone(f"{self.stage_id} of {self.workspace.root} is not done", "a finished stage")
        return result.attempt

    def trace(self) -> list[tuple[int, dict[str, float | None]]]:
        """Step and numbers, line by line."""
        path = self.workspace.layout.attempt(self.stage_id, self.attempt).metrics
        return [(line.step, line.metrics) for line in read_metrics(path)]

    def rollouts(self) -> dict[int, list[dict[str, Any]]]:
        """Rows by step."""
        folder = self.workspace.layout.attempt(self.stage_id, self.attempt).rollouts
        files = list_rollouts(folder)
        return {int(p.stem.removeprefix("step-")): read_rollouts(p) for p in files}

    @property
    def model(self) -> Path:
        """The exported weights."""
        folder = self.workspace.output_dir(self.stage_id)
        if folder is None:
            raise _gone(f"{self.stage_id} of {self.workspace.root} has no output", "its weights")
        return folder / "model"

    @property
    def checkpoint(self) -> Path:
        """The last complete checkpoint: that of the last step."""
        folder = self.workspace.layout.stage(self.stage_id).checkpoints
        found = CheckpointStore(folder, 0).latest()
        if found is None:
            raise _gone(f"{folder} has no complete checkpoint", "that of the last step")
        return found.path


def _gone(what: str, expected: str) -> WorkspaceError:
    fix = "prove it again with `refiner prove-resume`; leave its workspace alone meanwhile"
    return WorkspaceError(what, expected=expected, fix=fix)


def compare(straight: Trained, interrupted: Trained, *, same_layout: bool) -> list[Comparison]:
    """All that can be compared of two trainings.

    Parameters
    ----------
    same_layout
        Both ended on as many processes.
    """
    from refiner_core.training.state.equality import (
        compare_checkpoints,
        compare_rollouts,
        compare_traces,
        compare_weights,
    )

    trace = straight.trace()
    moved = sum(numbers.get("learning_rate") or 0.0 for _, numbers in trace)
    found = [compare_traces(trace, interrupted.trace())]
    if rollouts := straight.rollouts():
        found.append(compare_rollouts(rollouts, interrupted.rollouts()))
    found.append(compare_weights(straight.model, interrupted.model, moved))
    found += compare_checkpoints(
        straight.checkpoint, interrupted.checkpoint, moved, same_layout=same_layout
    )
    return [c for c in found if c.compared]


def prove_resume(
    plans: Plans, tell: Tell = lambda line: None, *, keep: bool = False
) -> list[ResumeProof]:
    """Prove that trainings resume exactly: run them straight and interrupted, and compare.

    Parameters
    ----------
    plans
        What :func:`flows.api.plan_resume_proofs` has made.
    tell
        Hears how far it is.
    keep
        Keep both runs (those that diverge always stay).

    Returns
    -------
    list of ResumeProof
        One per training: ``bitwise``, ``within tolerance`` or ``diverged``.

    Raises
    ------
    RefinerError
        A stage failed for a reason of its own.
    """
    workspace = Workspace.open(plans.config.workspace, plans.config.data_root)
    scratch = new_scratch(workspace, "-".join(s.short.id for s in plans.stages))
    evidence = False
    try:
        straight = _straight(plans, workspace, scratch, tell)
        proofs = []
        for one in plans.stages:
            proof = _prove(plans, one, straight, tell)
            write_proof(workspace, proof)
            proofs.append(proof)
        evidence = any(p.verdict == "diverged" for p in proofs)
        return proofs
    except StageFailed:
        evidence = True
        raise
    finally:
        if keep or evidence:
            keep_scratch(scratch)
            tell(f"Both runs are kept in {scratch}")
        else:
            atomic.remove_tree(scratch)


def _straight(plans: Plans, workspace: Workspace, scratch: Path, tell: Tell) -> Room:
    room = Room.make(scratch / "straight")
    share_stages(workspace, room.workspace, plans.given)
    run_recipe_in(room, plans.asked, plans.stages[-1].overrides, name="straight", tell=tell)
    return room


def _prove(plans: Plans, one: OneStage, straight: Room, tell: Tell) -> ResumeProof:
    asked, began = plans.asked, time.monotonic()
    done = [i for i in straight.workspace.stage_ids() if i != one.short.id]
    room = straight.beside(f"interrupted-{one.kind}", done)
    made = _interrupted(plans, one, room, tell)
    tell(f"comparing {one.kind}")
    same = one.resumed_on is None
    comparisons = compare(
        Trained(straight.workspace, one.short.id),
        Trained(room.workspace, one.short.id),
        same_layout=same,
    )
    return ResumeProof(
        version=PROOF_VERSION,
        recipe=plans.config.recipe,
        stage=one.full.name,
        stage_id=one.full.id,
        fingerprint=one.full.fingerprint,
        short_fingerprint=one.short.fingerprint,
        overrides=asked.overrides,
        changed=plans.changed,
        steps=Trained(straight.workspace, one.short.id).trace()[-1][0],
        seed=asked.seed,
        how=asked.how,
        wanted=asked.interruptions,
        interruptions=tuple(made),
        comparisons=tuple(comparisons),
        tolerance=one.tolerance,
        processes=asked.processes if same else one.processes,
        resume_processes=one.resumed_on,
        provenance={
            "host": host(),
            "versions": versions(),
            "code": straight.pinned.code,
            "commit": straight.pinned.provenance.get("commit"),
            "dirty": straight.pinned.provenance.get("dirty"),
        },
        made_at=now_text(),
        seconds=round(time.monotonic() - began, 1),
    )


def _interrupted(plans: Plans, one: OneStage, room: Room, tell: Tell) -> list[Interruption]:
    """The stage once more, hit again and again.

    On another number of processes it is resumed by another call, as somebody would who has fewer
    GPUs today: the first one ends with the first interruption.
    """
    asked, name = plans.asked, f"interrupted {one.kind}"
    overrides = _only_up_to(one)

    def hit(found: Interruption) -> None:
        tell(f"{name}: {interruption_line(found)}")

    def run(points: slice, *more: str, expect_end: bool = False) -> list[Interruption]:
        interrupter = Interrupter(room.workspace, one.short.id, one.points[points], hit)
        interrupter.start()
        try:
            run_recipe_in(room, asked, (*overrides, *more), name=name, tell=tell)
        except StageFailed:
            interrupter.leave()
            if not (expect_end and interrupter.made):
                raise
        finally:
            interrupter.leave()
        return interrupter.finished()

    if one.resumed_on is None:
        made = run(slice(None))
    else:
        made = run(slice(1), "dispatch.retries.killed=0", expect_end=True)
        resumed = f"{one.kind}.nproc_per_node={one.resumed_on}"
        made += run(slice(1, None), resumed)
    made = as_they_were(room.workspace, one.short.id, made)
    if not made:
        raise StageFailed(
            f"{one.kind} was over before it could be interrupted",
            expected=f"a training that takes longer than {asked.steps} of these steps do",
            fix="use more --steps",
        )
    return made


def _only_up_to(one: OneStage) -> tuple[str, ...]:
    """The overrides of a run that ends with this stage."""
    stages = '["data", "sft"]' if one.kind == "sft" else None
    return (*one.overrides, f"stages={stages}") if stages else one.overrides
