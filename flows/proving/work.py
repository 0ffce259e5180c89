"""A planned proof, carried out.

::

    straight run ──┬─> interrupted run of SFT  ──> compared ──> proofs/sft-…/proof.json
                   └─> interrupted run of GRPO ──> compared ──> proofs/grpo-…/proof.json

In: :class:`~flows.proving.planning.Plans`. Out: a :class:`ResumeProof` per stage, recorded. Stages
before the one that is interrupted are those of the straight run, so that each is judged by itself.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from flows.proving.planning import OneStage, Plans, interruption_line
from flows.proving.runs import Interrupter, Room, Tell, as_they_were, run_recipe_in, share_stages
from flows.stored import rollouts_by_step
from infra.store import atomic
from infra.store.checkpoints import CheckpointStore
from infra.store.provenance import host, keep_scratch, new_scratch, versions, write_proof
from infra.store.traces import read_metrics, read_rollouts
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.errors import StageFailed, WorkspaceError
from refiner_core.contract.proofs import PROOF_VERSION, Comparison, Interruption, ResumeProof


class Trained(NamedTuple):
    """A finished training, as far as it is compared: step and numbers line by line, rollouts by
    step, the exported weights, and the last complete checkpoint, which is that of the last step."""

    trace: list[tuple[int, dict[str, float | None]]]
    rollouts: dict[int, list[dict[str, Any]]]
    model: Path
    checkpoint: Path


def read_trained(workspace: Workspace, stage_id: str) -> Trained:
    """Files of the attempt that finished; they tell the whole story.

    Raises
    ------
    WorkspaceError
        The stage is not done, or its checkpoints are gone.
    """
    stage, result = workspace.layout.stage(stage_id), workspace.read_result(stage_id)
    checkpoint = CheckpointStore(stage.checkpoints, 0).latest()
    if result is None or checkpoint is None:
        undone = f"{stage_id} of {workspace.root} is not done"
        raise WorkspaceError(
            undone if result is None else f"{stage.checkpoints} has no complete checkpoint",
            expected="a finished stage" if result is None else "that of the last step",
            fix="prove it again with `refiner prove-resume`; leave its workspace alone meanwhile",
        )
    paths = stage.attempt(result.attempt)
    rollouts = rollouts_by_step(paths.rollouts)
    return Trained(
        trace=[(line.step, line.metrics) for line in read_metrics(paths.metrics)],
        rollouts={step: read_rollouts(path) for step, path in rollouts.items()},
        model=stage.data / result.output_dir / "model",
        checkpoint=checkpoint.path,
    )


def compare(straight: Trained, interrupted: Trained, *, same_layout: bool) -> list[Comparison]:
    """All that can be compared of two trainings, in the order in which things come about. Needs
    torch, which is imported when it is called.

    Parameters
    ----------
    same_layout
        Both ended on as many processes.
    """
    from refiner_core.training.equality import (
        compare_checkpoints,
        compare_rollouts,
        compare_traces,
        compare_weights,
    )

    moved = sum(numbers.get("learning_rate") or 0.0 for _, numbers in straight.trace)
    found = [compare_traces(straight.trace, interrupted.trace)]
    if straight.rollouts:
        found.append(compare_rollouts(straight.rollouts, interrupted.rollouts))
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
        straight = Room.make(scratch / "straight")
        share_stages(workspace, straight.workspace, plans.given)
        overrides = plans.stages[-1].overrides
        run_recipe_in(straight, plans.asked, overrides, name="straight", tell=tell)
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


def _prove(plans: Plans, one: OneStage, straight: Room, tell: Tell) -> ResumeProof:
    asked, began = plans.asked, time.monotonic()
    done = [i for i in straight.workspace.stage_ids() if i != one.short.id]
    room = straight.beside(f"interrupted-{one.kind}", done)
    made = _interrupted(plans, one, room, tell)
    tell(f"comparing {one.kind}")
    same = one.resumed_on is None
    undisturbed, hit = (read_trained(r.workspace, one.short.id) for r in (straight, room))
    comparisons = compare(undisturbed, hit, same_layout=same)
    return ResumeProof(
        version=PROOF_VERSION,
        recipe=plans.config.recipe,
        stage=one.full.name,
        stage_id=one.full.id,
        fingerprint=one.full.fingerprint,
        short_fingerprint=one.short.fingerprint,
        overrides=asked.overrides,
        changed=plans.changed,
        steps=undisturbed.trace[-1][0],
        seed=asked.seed,
        how=asked.how,
        wanted=asked.interruptions,
        interruptions=tuple(made),
        comparisons=tuple(comparisons),
        tolerance=one.tolerance,
        processes=None if same else one.processes,
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
    # GRPO is the last stage anyway.
    overrides = (*one.overrides, *(['stages=["data", "sft"]'] if one.kind == "sft" else []))

    def hit(found: Interruption) -> None:
        tell(f"{name}: {interruption_line(found)}")

    def run(points: slice, *more: str, expect_end: bool = False) -> list[Interruption]:
        interrupter = Interrupter(room.workspace, one.short.id, one.points[points], hit)
        with ThreadPoolExecutor(1, "interrupter") as pool:
            hits = pool.submit(interrupter.run)
            try:
                run_recipe_in(room, asked, (*overrides, *more), name=name, tell=tell)
            except StageFailed:
                if not (expect_end and interrupter.made):
                    raise
            finally:
                interrupter.leave()
        return hits.result()

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
