"""The plan of a reclaim: what is deleted, in which order, and what never is."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.disk.garbage_collection import Candidate, ReclaimOrder, plan_reclaim
from infra.disk.inventory import Inventory, PublishedCopy, StageFacts, Weights
from infra.disk.usage import DiskItem, DiskSize, Kind
from refiner_core.contract.records import OutputFile

MIB = 1 << 20
FILE = OutputFile("model/model.safetensors", 10 * MIB, "ab" * 32)
COPY = PublishedCopy("folder", "/archive/model", {FILE.sha256: "model.safetensors"})
WEIGHTS = Weights(Path("/ws/sft-1/output"), (FILE,), 10 * MIB, COPY)
RUNNING = StageFacts(kind="grpo", open=True)
DONE = StageFacts(kind="sft", done=True, kept_attempt=2, dead=frozenset({1}), weights=WEIGHTS)


def item(
    kind: Kind, stage_id: str, name: str, attempt: int = 0, step: int | None = None
) -> DiskItem:
    folder = "checkpoints" if kind in ("checkpoints", "temporary") else "attempts"
    path = Path("/ws") / stage_id / folder / name
    return DiskItem(path, kind, DiskSize(MIB, 2, MIB), stage_id, attempt, step)


def checkpoint(stage_id: str, step: int) -> DiskItem:
    return item("checkpoints", stage_id, f"step-{step:08d}", step=step)


def stock(*items: DiskItem, complete: bool = True, **stages: StageFacts) -> Inventory:
    found = frozenset(i.path for i in items if i.step is not None and complete)
    return Inventory(items, {k.replace("_", "-"): v for k, v in stages.items()}, found)


def names(candidates: list[Candidate]) -> list[str]:
    return [c.path.name for c in candidates]


# ---------------------------------------------------------------- order


def everything() -> Inventory:
    """One of each kind that may go, and what may not."""
    base = stock(
        checkpoint("grpo-1", 100),
        checkpoint("grpo-1", 9),
        checkpoint("grpo-1", 50),
        checkpoint("sft-1", 7),
        item("outputs", "sft-1", "0001", attempt=1),
        item("outputs", "sft-1", "0002", attempt=2),
        item("temporary", "sft-1", ".tmp-step-00000009-a1", attempt=1),
        DiskItem(Path("/ws/code/old"), "code", DiskSize(MIB, 50, MIB)),
        DiskItem(Path("/ws/code/new"), "code", DiskSize(MIB, 50, MIB)),
        grpo_1=RUNNING,
        sft_1=DONE,
    )
    return replace(base, idle_code=frozenset({"old"}))


def test_what_costs_least_goes_first_and_steps_by_number() -> None:
    found = plan_reclaim(everything(), None)
    assert [(c.rank, c.path.name) for c in found] == [
        (ReclaimOrder.LEFTOVER, ".tmp-step-00000009-a1"),
        (ReclaimOrder.SUPERSEDED, "0001"),
        (ReclaimOrder.FINISHED, "step-00000007"),
        (ReclaimOrder.OLDER, "step-00000009"),
        (ReclaimOrder.OLDER, "step-00000050"),
        (ReclaimOrder.CODE, "old"),
        (ReclaimOrder.WEIGHTS, "output"),
    ]


def test_no_more_is_deleted_than_is_needed() -> None:
    assert names(plan_reclaim(everything(), 2 * MIB)) == [".tmp-step-00000009-a1", "0001"]
    assert plan_reclaim(everything(), 0) == []
    found = plan_reclaim(everything(), 1, need_inodes=20)
    assert found[-1].rank is ReclaimOrder.CODE
    assert sum(c.inodes for c in found) >= 20
    assert plan_reclaim(everything(), 16 * MIB)[-1].rank is ReclaimOrder.WEIGHTS
    assert plan_reclaim(everything(), 999 * MIB)[-1].rank is ReclaimOrder.CODE, "no weights in vain"


def test_stored_judgements_go_last_and_oldest_first() -> None:
    """To judge again costs calls; all else that may go costs nothing, or a download."""
    names_ = ("old.sealed", "new.sealed", "busy.live")
    files = [
        DiskItem(Path("/ws/judgements") / n, "judgements", DiskSize(MIB, 1, MIB)) for n in names_
    ]
    base = everything()
    full = replace(base, items=(*files, *base.items))
    assert names(plan_reclaim(full, 17 * MIB))[-2:] == ["output", "old.sealed"]
    assert names(plan_reclaim(full, 18 * MIB))[-2:] == ["old.sealed", "new.sealed"]
    assert plan_reclaim(full, 999 * MIB)[-1].rank is ReclaimOrder.CODE, "none is given up in vain"
    assert plan_reclaim(full, None) == plan_reclaim(base, None), "not without a need"
    assert names(plan_reclaim(full, 19 * MIB))[-1] == "busy.live", "another one is begun then"
    asked = plan_reclaim(full, None, judgements=True)
    assert names(asked)[-3:] == [*names_], "on request"


# ---------------------------------------------------------------- protections


@pytest.mark.parametrize(
    "change",
    [
        {"weights": WEIGHTS._replace(copy=None)},
        {"pinned": True},
        {"leased": True},
        {"needed_by": "evaluate-sft of run 3"},
        {"done": False},
        {"weights": WEIGHTS._replace(gain=0)},
    ],
)
def test_weights_stay_when_they_are(change: dict[str, Any]) -> None:
    assert [c.rank for c in plan_reclaim(stock(sft_1=DONE), None)] == [ReclaimOrder.WEIGHTS]
    assert plan_reclaim(stock(sft_1=replace(DONE, **change)), None) == []


def test_a_stage_whose_records_cannot_be_read_is_left_alone() -> None:
    assert plan_reclaim(stock(checkpoint("grpo-1", 1), checkpoint("grpo-1", 2)), None) == []


def test_what_a_running_attempt_or_an_orchestrator_is_writing_stays() -> None:
    output = item("outputs", "grpo-1", "0003", attempt=3)
    half = item("temporary", "grpo-1", ".tmp-step-00000009-a3", attempt=3)
    unnamed = item("temporary", "grpo-1", ".tmp-probe-1-ab")
    assert plan_reclaim(stock(output, half, unnamed, grpo_1=RUNNING), None) == []
    ended = replace(RUNNING, open=False, dead=frozenset({3}))
    assert names(plan_reclaim(stock(output, grpo_1=ended), None)) == ["0003"]
    control = item("temporary", "sft-1", "x")._replace(path=Path("/ws/sft-1/.tmp-spec.json-1-ab"))
    assert plan_reclaim(stock(control, sft_1=replace(DONE, weights=None)), None) == []


def test_another_trainer_s_folder_goes_only_with_its_result() -> None:
    work = item("checkpoints", "command-1", "work")
    running, done = StageFacts("command", open=True), StageFacts("command", done=True)
    assert plan_reclaim(stock(work, command_1=running), None) == []
    assert names(plan_reclaim(stock(work, command_1=done), None)) == ["work"]


# ---------------------------------------------------------------- any stage at all


FLAGS = ("done", "pinned", "open", "leased", "complete", "needed")


@pytest.mark.parametrize("need", [None, 0, 2, 20])
def test_whatever_a_stage_is_the_protected_stays(need: int | None) -> None:
    """Never its newest complete checkpoint before it is done, and nothing that somebody reads."""
    items = (
        *(checkpoint("sft-1", step) for step in (9, 50, 100)),
        *(item(kind, "sft-1", kind, 1) for kind in ("outputs", "temporary", "rollouts", "logs")),
    )
    for values in itertools.product((True, False), repeat=len(FLAGS)):
        flags = dict(zip(FLAGS, values, strict=True))
        reader, complete = "grpo" if flags.pop("needed") else "", flags.pop("complete")
        about = StageFacts("sft", dead=frozenset({1}), weights=WEIGHTS, needed_by=reader, **flags)
        wanted = None if need is None else need * MIB
        chosen = plan_reclaim(stock(*items, complete=complete, sft_1=about), wanted)
        gone, ranks = set(names(chosen)), {c.rank for c in chosen}
        assert not gone & {"rollouts", "logs"}
        if complete and not about.done:
            assert "step-00000100" not in gone
        if about.pinned:
            assert chosen == []
        if ReclaimOrder.WEIGHTS in ranks:
            assert about.done
            assert not about.leased
            assert not about.needed_by
        if about.leased:
            assert ReclaimOrder.SUPERSEDED not in ranks
