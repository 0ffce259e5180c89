"""`refiner runs`, `tag`, `rm`, `prune`, `bundle` and `unbundle`."""

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows import api
from flows.cli.main import main
from flows.disk import disk_report
from flows.runs.run_table import changes_of, list_rows
from infra.disk import removal
from infra.host.processes import ProcessId
from infra.store import atomic
from infra.store.checkpoints import pin
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError, DataError, NoSpaceError, RefinerError
from tests.bench.many_runs import write_runs
from tests.support.plans import claim, run_record, small_plan


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three finished runs; their rewards are known, their `grpo.beta` differ."""
    monkeypatch.setenv("REFINER_STATE_DIR", str(tmp_path / "state"))
    write_runs(tmp_path / "runs", 3)
    return tmp_path / "runs"


def call(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_row_has_state_changes_metrics_and_cost(place: Path) -> None:
    rows = list_rows(place)
    assert [row.run for row in rows] == sorted((row.run for row in rows), reverse=True)
    assert {row.state for row in rows} == {"done"}
    assert all(row.model == "grpo" and row.metrics["reward"]["n"] == 100 for row in rows)
    assert all(row.cpu_hours == pytest.approx(3 / 60, rel=0.01) for row in rows)
    assert all(changes_of(rows)[row.run] == row.overrides for row in rows)


def test_the_base_model_is_no_result_of_a_run_that_trains(place: Path) -> None:
    run = Workspace.open(place).run_ids()[-1]
    stage = Workspace.open(place).read_run(run).stages["evaluate-grpo"]
    path = place / "stages" / stage / "result.json"
    result = json.loads(path.read_text())
    for entry in result["report"]["evaluations"]:
        entry["stage"] = "base"
    path.write_text(json.dumps(result))
    (row,) = (row for row in list_rows(place) if row.run == run)
    assert (row.model, row.metrics) == ("", {})


def test_what_all_runs_of_a_recipe_share_is_no_change(place: Path) -> None:
    rows = [replace(r, overrides=("seed=2", *r.overrides)) for r in list_rows(place)]
    assert all("seed=2" not in changes for changes in changes_of(rows).values())


@pytest.mark.parametrize(
    ("where", "matches"),
    [
        ("reward >= 0", lambda row: row.metrics["reward"]["value"] >= 0),
        ("grpo.beta < 0.005", lambda row: row.fields.get("grpo.beta", 0.0) < 0.005),
        ("0.2 < reward < 0.8 or state != 'done'", lambda row: 0.2 < row.value("reward") < 0.8),
        (
            'metric["oracle"] > 0.5 and recipe in ["tiny", "x"]',
            lambda row: row.value("oracle") > 0.5,
        ),
        ("judge_calls > 0", lambda row: False),  # missing values match nothing
        ("not judge_calls > 0", lambda row: True),
        ("sft.learning_rate == 3.0e-3", lambda row: True),  # set by the recipe, not by an override
    ],
)
def test_filters(place: Path, where: str, matches: Any) -> None:
    assert list_rows(place, where=where) == [row for row in list_rows(place) if matches(row)]


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("__import__('os').system('id')", "has `__import__"),
        ("(lambda: 1)()", "has `"),
        ("reward + 1 > 2", "has `reward \\+ 1`"),
        ("reward >", "is not understood"),
        ("grpo.bta > 1", "Did you mean 'grpo.beta'"),
        ("state > 3", "compares 'done' with 3"),
    ],
)
def test_filters_that_are_refused(place: Path, where: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        list_rows(place, where=where)


def test_repetitions_and_nights_are_folded_away(place: Path) -> None:
    workspace = Workspace.open(place)
    run = workspace.read_run(list_rows(place)[0].run)
    again = replace(run, run="20270101-000000-tiny-ffff", started_at="2027-01-01T00:00:00+00:00")
    workspace.write_run(again)
    night = {**again.provenance, "nightly": "n"}
    workspace.write_run(replace(again, run="20270102-000000-tiny-eeee", provenance=night))
    assert len(list_rows(place)) == 3
    assert len(list_rows(place, every=True)) == 5


def test_an_unfinished_run_is_read_again_when_an_attempt_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFINER_STATE_DIR", str(tmp_path / "state"))
    workspace, plan = Workspace.open(tmp_path / "runs"), small_plan()
    workspace.write_run(run_record(workspace, plan))
    assert [row.state for row in list_rows(workspace.root)] == ["not begun"]
    claim(workspace, plan, "data")
    assert [row.state for row in list_rows(workspace.root)] != ["not begun"]


def test_a_damaged_record_hides_no_other_run(place: Path) -> None:
    rows = list_rows(place)
    (next(iter((place / "stages").glob("evaluate-*/result.json")))).write_text("{")
    (place / "runs" / rows[-1].run / "run.json").write_text("{")
    list_rows(place)
    shutil.rmtree(place.parent / "state")
    assert 1 <= len(list_rows(place)) <= 2


def test_notes_and_tags(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, where = list_rows(place)[0].run, f"workspace={place}"
    label = call(capsys, "tag", run[-6:], "good", "keep", "--note", "try beta", where)
    assert (label["run"], label["note"], label["tags"]) == (run, "try beta", ["good", "keep"])
    call(capsys, "tag", run, "keep", "--remove", where)
    (row,) = call(capsys, "runs", "--where", '"good" in tags and "beta" in note', where)["runs"]
    assert (row["run"], row["tags"]) == (run, ["good"])
    assert main(["status", run, where]) == 0
    assert "try beta #good" in capsys.readouterr().out
    assert main(["report", run, where, "--out", str(place.parent / "page")]) == 0
    assert "try beta #good" in capsys.readouterr().out.replace("\\", "")
    assert "try beta #good" in (place.parent / "page/report.html").read_text()


# ---------------------------------------------------------------- removing


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


# ---------------------------------------------------------------- bundles


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REFINER_STATE_DIR", str(tmp_path / "state"))
    write_runs(tmp_path / "runs", 2)
    return tmp_path / "runs"


@pytest.mark.parametrize("data_root", [False, True])
def test_a_run_is_the_same_elsewhere(two_runs: Path, tmp_path: Path, data_root: bool) -> None:
    (row, _) = api.list_rows(two_runs)
    api.label_run(row.run, two_runs, tags=["good"])
    (row, _) = api.list_rows(two_runs)
    made = api.bundle_run(row.run, two_runs, out=tmp_path / "b.tar.gz")
    other = tmp_path / "other"
    Workspace.open(other, tmp_path / "big" if data_root else None)
    found = api.unbundle(made.file, other)
    assert (found.run, len(found.stages), found.kept) == (row.run, 3, ())
    assert api.list_rows(other) == [row]
    assert not list((other / "trash").iterdir())
    with pytest.raises(ConfigurationError, match="has the run"):
        api.unbundle(made.file, other)


def test_stages_that_are_there_stay(two_runs: Path, tmp_path: Path) -> None:
    first, second = (row.run for row in api.list_rows(two_runs))
    for run in (first, second):
        api.bundle_run(run, two_runs, out=tmp_path / f"{run}.tar.gz")
    api.unbundle(tmp_path / f"{first}.tar.gz", tmp_path / "other")
    assert api.unbundle(tmp_path / f"{second}.tar.gz", tmp_path / "other").kept == ("data-0000",)


def test_the_commands_of_bundles(
    two_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bundle", f"workspace={two_runs}", "--json"]) == 0
    file = json.loads(capsys.readouterr().out)["file"]
    assert main(["unbundle", file, f"workspace={tmp_path / 'other'}"]) == 0
    assert main(["bundle", f"workspace={two_runs}"]) == 2, "the file exists"


def rewritten(file: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> Path:
    """The bundle with other members."""
    with tarfile.open(file) as tar:
        members = [(m, tar.extractfile(m).read()) for m in tar]
    change(members)
    out = file.with_name("changed.tar.gz")
    with tarfile.open(out, "w:gz") as tar:
        for info, content in members:
            info.size = len(content) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(content))
    return out


def named(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def in_manifest(name: str) -> Callable[[list[Any]], None]:
    """A file that the manifest names, too."""

    def change(members: list[Any]) -> None:
        manifest = json.loads(members[0][1])
        manifest["files"].append([name, 1, "0"])
        members[0] = (members[0][0], json.dumps(manifest).encode())
        members.append((named(name), b"x"))

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda members: members.append((named("../out"), b"x")),
        lambda members: members.append((named("stages/x/y", tarfile.SYMTYPE, "/etc/passwd"), b"")),
        lambda members: members.append((named("stages/data-0000/more.json"), b"{}")),
        lambda members: members.__setitem__(1, (members[1][0], b"other")),
        lambda members: members.__setitem__(1, (members[1][0], members[1][1][:-1] + b"!")),
        lambda members: members.pop(2),
        lambda members: members.pop(0),
        in_manifest("../../out"),
        in_manifest("/tmp/out"),
        in_manifest("code/x/evil.py"),
        in_manifest("runs/another/run.json"),
        in_manifest("stages/./x/y"),
    ],
)
def test_a_changed_bundle_is_refused_and_leaves_nothing(
    two_runs: Path, tmp_path: Path, change: Callable[[list[Any]], None]
) -> None:
    made = api.bundle_run(None, two_runs, out=tmp_path / "b.tar.gz")
    other = tmp_path / "other"
    with pytest.raises(DataError):
        api.unbundle(rewritten(made.file, change), other)
    assert Workspace.read_only(other).run_ids() == []
    assert Workspace.read_only(other).stage_ids() == []
    assert not list((other / "trash").glob("*"))
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_bundle_or_too_large_is_refused(two_runs: Path, tmp_path: Path) -> None:
    for content in (b"", b"text", gzip.compress(b"x" * 5000)):
        (tmp_path / "b").write_bytes(content)
        with pytest.raises(DataError):
            api.unbundle(tmp_path / "b", tmp_path / "other")
    made = api.bundle_run(None, two_runs, out=tmp_path / "b.tar.gz")

    def huge(members: list[Any]) -> None:
        manifest = json.loads(members[0][1])
        manifest["files"][0][1] = 1 << 60
        members[0] = (members[0][0], json.dumps(manifest).encode())

    with pytest.raises(RefinerError, match="are free"):
        api.unbundle(rewritten(made.file, huge), tmp_path / "other")
