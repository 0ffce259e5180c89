"""`refiner rm` and `prune`: what goes, what stays, and a removal that is killed at any step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows import api
from flows.cli.main import main
from flows.disk import disk_report
from flows.runs.run_table import list_rows
from infra.disk import removal
from infra.host.processes import ProcessId
from infra.store import atomic
from infra.store.checkpoints import pin
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError, NoSpaceError
from tests.bench.many_runs import write_runs
from tests.support.plans import claim, run_record, small_plan


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three finished runs over one data stage."""
    monkeypatch.setenv("REFINER_STATE_DIR", str(tmp_path / "state"))
    write_runs(tmp_path / "runs", 3)
    return tmp_path / "runs"


def stages(place: Path) -> set[str]:
    return set(Workspace.read_only(place).stage_ids())


def ids(place: Path) -> list[str]:
    return Workspace.read_only(place).run_ids()


def test_a_run_goes_with_its_own_stages_and_leaves_the_shared_one(place: Path) -> None:
    first, *others = ids(place)
    own = set(Workspace.read_only(place).read_run(first).stages.values()) - {"data-0000"}
    planned = api.remove_runs([first], place)
    assert (set(planned.plan.stages), set(planned.plan.shared)) == (own, {"data-0000"})
    assert ids(place) == [first, *others], "a plan changes nothing"
    done = api.remove_runs([first], place, dry_run=False)
    assert done.done
    assert done.plan.bytes > 0
    assert (ids(place), stages(place) & own) == (others, set())
    assert "data-0000" in stages(place)
    assert not list((place / "trash").iterdir())
    assert len(list_rows(place)) == 2


def test_the_last_run_takes_the_shared_stage_along(place: Path) -> None:
    api.remove_runs(ids(place), place, dry_run=False)
    assert (ids(place), stages(place)) == ([], set())


def test_pinned_running_and_unverified_runs_stay(place: Path) -> None:
    ws, run = Workspace.open(place), ids(place)[0]
    pin(ws.layout, ws.read_run(run).stages["grpo"])
    assert "is pinned" in api.remove_runs([run], place, dry_run=False).plan.refused[run]
    plan = small_plan("data", "sft", "publish")
    unfinished = run_record(ws, plan)
    ws.write_run(unfinished)
    claim(ws, plan, "data")
    refused = api.remove_runs([unfinished.run], place, dry_run=False).plan.refused
    assert "may be running" in refused[unfinished.run]
    assert {run, unfinished.run} <= set(ids(place))


def test_a_stage_that_another_run_starts_from_by_path_stays(place: Path) -> None:
    ws, (first, second, *_) = Workspace.open(place), ids(place)
    source = ws.read_run(first).stages["grpo"]
    other = ws.read_run(second)
    model = {"name_or_path": f"{place}/stages/{source}/attempts/0001/output/model"}
    ws.write_run(replace(other, config={**other.config, "model": model}))
    assert api.remove_runs([first], place).plan.shared[source] == second


@pytest.mark.parametrize("step", range(11))
def test_a_removal_that_is_killed_is_completed_and_loses_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    first, *others = ids(place)
    gone = {first, *Workspace.read_only(place).read_run(first).stages.values()} - {"data-0000"}
    kept = {p: p.read_bytes() for p in files(place) if gone.isdisjoint(p.parts)}
    left = iter(range(step))

    def killing(work: Callable[..., Any]) -> Callable[..., Any]:
        def done(*arguments: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return work(*arguments)

        return done

    with monkeypatch.context() as patch:
        for name, owner in (("remove_tree", atomic), ("_move", removal)):
            patch.setattr(owner, name, killing(getattr(owner, name)))
        with pytest.raises(KeyboardInterrupt):
            api.remove_runs([first], place, dry_run=False)
    monkeypatch.setattr(ProcessId, "alive", property(lambda _: False))
    removal.finish_removals(Workspace.open(place))
    assert (ids(place), len(stages(place))) == (others, 5)
    assert {p: p.read_bytes() for p in files(place)} == kept
    assert not list((place / "trash").iterdir())


def files(place: Path) -> list[Path]:
    return sorted(p for p in place.rglob("*") if p.is_file())


def test_a_stage_that_a_new_run_names_meanwhile_goes_back(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ws, first = Workspace.open(place), ids(place)[0]
    grpo, move = ws.read_run(first).stages["grpo"], removal._move

    def moved(path: Path, target: Path) -> None:
        if path.name == grpo and "trash" in target.parts:
            begun = replace(ws.read_run(first), run="20270101-000000-tiny-ffff")
            ws.write_run(begun)
        move(path, target)

    monkeypatch.setattr(removal, "_move", moved)
    api.remove_runs([first], place, dry_run=False)
    assert ids(place)[-1] == "20270101-000000-tiny-ffff"
    assert grpo in stages(place)


def test_a_stage_that_was_made_again_is_not_the_one_in_the_trash(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ws, first = Workspace.open(place), ids(place)[0]
    run = ws.read_run(first)
    folder = ws.layout.stage(run.stages["grpo"]).control
    copy = place.parent / "copy"
    shutil.copytree(folder, copy)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "remove_tree", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            api.remove_runs([first], place, dry_run=False)
    assert not folder.exists()
    shutil.copytree(copy, folder)
    ws.write_run(replace(run, run="20270101-000000-tiny-ffff"))
    api.remove_runs(ids(place)[:1], place, dry_run=False)
    assert folder.exists()
    assert ids(place)[-1] == "20270101-000000-tiny-ffff"


def test_it_works_on_a_disk_so_full_that_nothing_can_be_recorded(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise NoSpaceError("full")

    monkeypatch.setattr(Workspace, "replace", full)
    first, *others = ids(place)
    api.remove_runs([first], place, dry_run=False)
    assert (ids(place), len(stages(place))) == (others, 5)


def test_prune_keeps_the_best_the_young_and_the_tagged(place: Path) -> None:
    write_runs(place, 6)
    rows = sorted(list_rows(place), key=lambda row: -row.value("reward"))
    api.label_run(rows[-1].run, place, tags=["keep"])
    found = api.prune_runs(place, older_than="1h", keep_best=2, metric="reward")
    old = [row for row in rows if row.started < "2026-11"]
    assert set(found.plan.runs) == {
        row.run for row in old if row not in rows[:2] and row is not rows[-1]
    }
    assert not api.prune_runs(place, older_than="999w").plan.runs
    with pytest.raises(ConfigurationError, match="is no age"):
        api.prune_runs(place, older_than="soon")


def test_the_commands(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, where = ids(place)[0], f"workspace={place}"
    assert main(["rm", first, where, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] is False
    assert main(["rm", first, where]) == 2, "without a terminal it needs --yes"
    assert main(["rm", first, "--yes", where]) == 0
    assert "Removed 1 runs and 2 stages." in capsys.readouterr().out
    assert main(["prune", "--older-than", "30d", "--dry-run", where]) == 0


def test_disk_says_what_runs_share_and_what_each_alone_takes(tmp_path: Path) -> None:
    write_runs(tmp_path, 2)
    _, found = disk_report(tmp_path)
    assert len(found["unique"]) == 2
    assert all(size > 0 for size in found["unique"].values())
    alone = sum(found["unique"].values())
    assert 0 < found["total"]["shared_bytes"] <= found["total"]["bytes"] - alone
