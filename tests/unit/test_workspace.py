"""A workspace: opening, the data root, claims, records, atomic files, provenance."""

import errno
import json
import os
import stat
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from flows.running.calls import plan_of_run
from flows.running.status import RunWatcher
from infra.orchestrator.observe import explain_difference, observe_actions
from infra.store import atomic
from infra.store import records as record_files
from infra.store.provenance import checkout_of, reads_parts_apart
from infra.store.records import Part
from infra.store.workspace import FORMAT, SHARED, StageClaim, Workspace
from refiner_core.contract.errors import ConfigurationError, NoSpaceError, WorkspaceError
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.records import (
    Attempt,
    AttemptOutcome,
    OutputFile,
    StageResult,
    from_json,
    to_json,
)
from tests.support.plans import OWNER, SOURCES, claim, run_record, small_config, small_plan
from tests.support.recorded_run import RecordedRun


@pytest.fixture
def plan() -> Plan:
    return small_plan()


def result_of(attempt: int) -> StageResult:
    return StageResult(
        1, attempt, f"attempts/{attempt:04d}/output", (), {"n": 1}, {}, 1.5, "2026-11-21T00:00:00"
    )


# ---------------------------------------------------------------- opening


def test_opening_makes_a_workspace_and_reading_does_not(tmp_path: Path, plan: Plan) -> None:
    root = tmp_path / "a" / "ws"
    actions = observe_actions(plan, Workspace.read_only(root))
    assert [(a.stage.name, a.action) for a in actions] == [("data", "run"), ("sft", "run")]
    assert not root.exists()
    text = Workspace.open(root).layout.format_file.read_text()
    assert json.loads(text)["format"] == 1, "older versions read it as well"
    assert Workspace.open(root).layout.format_file.read_text() == text


def test_a_file_in_the_place_of_the_workspace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ws").write_text("not a folder")
    for opening in (Workspace.open, Workspace.read_only):
        with pytest.raises(WorkspaceError, match="is not a folder"):
            opening(tmp_path / "ws")


def test_a_newer_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "workspace.json").write_text(json.dumps({"format": FORMAT + 1}))
    with pytest.raises(WorkspaceError, match=f"names format {FORMAT + 1}"):
        Workspace.open(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["workspace.json"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EACCES, WorkspaceError), (errno.ENOSPC, NoSpaceError), (errno.EDQUOT, NoSpaceError)],
)
def test_a_folder_that_cannot_be_written_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(atomic, "_write_new", refuse)
    with pytest.raises(kind):
        Workspace.open(tmp_path / "ws")


def test_files_follow_the_umask_of_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED, str(tmp_path / "ws"))
    before = os.umask(0o002)
    try:
        workspace = Workspace.open(tmp_path / "ws")
    finally:
        os.umask(before)
    assert stat.S_IMODE(workspace.layout.format_file.stat().st_mode) == 0o664
    assert stat.S_IMODE(workspace.layout.stages.stat().st_mode) == 0o775


# ---------------------------------------------------------------- data in another place


def test_a_data_root_is_given_once_and_known_to_later_callers(tmp_path: Path, plan: Plan) -> None:
    made = Workspace.open(tmp_path / "ws", tmp_path / "big")
    stage = claim(made, plan, "data")
    for later in (Workspace.open(tmp_path / "ws"), Workspace.read_only(tmp_path / "ws")):
        paths = later.layout.attempt(stage.id, 1)
        assert paths.intent.exists()
        assert paths.output.is_relative_to(tmp_path / "big")
        assert later.layout.stage(stage.id).checkpoints.is_relative_to(tmp_path / "big")
        assert later.layout.published.is_relative_to(tmp_path / "big")
    assert [p.name for p in (tmp_path / "big").iterdir()] == ["refiner-data.json"]
    written = json.loads(made.layout.format_file.read_text())["format"]
    assert written == FORMAT, "older versions would not find the data"


def test_a_workspace_can_be_moved_with_a_data_root_inside(tmp_path: Path, plan: Plan) -> None:
    workspace = Workspace.open(tmp_path / "ws", tmp_path / "ws" / "data")
    stage = claim(workspace, plan, "data")
    workspace.publish_result(stage.id, result_of(1))
    (tmp_path / "ws").rename(tmp_path / "moved")
    moved = Workspace.open(tmp_path / "moved")
    assert moved.layout.data == tmp_path / "moved" / "data"
    output = moved.output_dir(stage.id)
    assert output.is_relative_to(tmp_path / "moved" / "data")


@pytest.mark.parametrize("first", [None, "big"])
def test_another_data_root_is_refused_with_how_to_move(tmp_path: Path, first: str | None) -> None:
    Workspace.open(tmp_path / "ws", None if first is None else tmp_path / first)
    Workspace.open(tmp_path / "ws")
    with pytest.raises(ConfigurationError, match=r"data_root is .*other.*move .* to the new place"):
        Workspace.open(tmp_path / "ws", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_unmounted_data_root_is_refused(tmp_path: Path, plan: Plan) -> None:
    made = Workspace.open(tmp_path / "ws", tmp_path / "big")
    claim(made, plan, "data")
    (tmp_path / "big").rename(tmp_path / "unmounted")
    (tmp_path / "big").mkdir()
    with pytest.raises(WorkspaceError, match="is missing or empty"):
        Workspace.open(tmp_path / "ws")
    (tmp_path / "big").rmdir()
    (tmp_path / "unmounted").rename(tmp_path / "big")
    Workspace.open(tmp_path / "ws")


def test_two_workspaces_do_not_share_a_data_root(tmp_path: Path) -> None:
    Workspace.open(tmp_path / "one", tmp_path / "big")
    with pytest.raises(ConfigurationError, match=r"another workspace, .*/one"):
        Workspace.open(tmp_path / "two", tmp_path / "big")
    assert not (tmp_path / "two" / "workspace.json").exists(), "another data root can be named"


# ---------------------------------------------------------------- claims


def test_of_many_claims_at_once_exactly_one_wins(workspace: Workspace, plan: Plan) -> None:
    stage, won, barrier = plan.by_name["data"], [], threading.Barrier(8)

    def compete(number: int) -> None:
        barrier.wait()
        mine = StageClaim(f"host:{number}:1.0", "local")
        won.append(workspace.claim_attempt(stage, plan.config, {}, mine))

    threads = [threading.Thread(target=compete, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [a for a in won if a is not None]
    assert len(winners) == 1
    record = workspace.read_record(stage.id)
    assert [a.comment for a in record.attempts] == [winners[0].comment]
    assert not list(workspace.layout.stage(stage.id).attempts.glob(".tmp-*"))


def test_only_the_newest_attempt_counts(workspace: Workspace, plan: Plan) -> None:
    stage = claim(workspace, plan, "data")
    assert not workspace.is_stale(stage.id, 1)
    claim(workspace, plan, "data", after=1)
    assert workspace.is_stale(stage.id, 1)
    assert not workspace.is_stale(stage.id, 2)
    for seen in (0, 1):
        assert (
            workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "local", seen))
            is None
        )


def test_a_stage_with_a_result_is_not_run_again(workspace: Workspace, plan: Plan) -> None:
    """Also after a kill between result and outcome."""
    stage = claim(workspace, plan, "data")
    assert workspace.publish_result(stage.id, result_of(1))
    assert workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "local", 1)) is None
    assert workspace.claim_restart(stage.id, 1, {}) is None
    record = workspace.read_record(stage.id)
    assert record.state == "done"
    assert record.attempts[0].outcome == AttemptOutcome("none", "finish")
    assert record.attempts[1].outcome is not None, "nothing waits for it"


def test_the_state_of_a_stage_follows_its_records(workspace: Workspace, plan: Plan) -> None:
    stage = plan.by_name["data"]
    assert workspace.read_record(stage.id) is None

    def state() -> str:
        record = workspace.read_record(stage.id)
        return record.state

    claim(workspace, plan, "data")
    assert state() == "claimed"
    workspace.close_attempt(stage.id, 1, AttemptOutcome("killed", "resume"))
    assert state() == "interrupted"
    claim(workspace, plan, "data", after=1)
    workspace.close_attempt(stage.id, 2, AttemptOutcome("bug", "stop"))
    assert state() == "failed"
    workspace.publish_result(stage.id, result_of(2))
    assert state() == "done"
    assert not workspace.publish_result(stage.id, result_of(1)), "a result is written once"
    assert not workspace.close_attempt(stage.id, 2, AttemptOutcome("none", "finish"))


def test_a_voided_attempt_cannot_start(workspace: Workspace, plan: Plan) -> None:
    stage = claim(workspace, plan, "data")
    assert workspace.void_attempt(stage.id, 1)
    assert not workspace.start_attempt(stage.id, 1, {"process": "a:1:1"})
    claim(workspace, plan, "data", after=1)
    assert workspace.start_attempt(stage.id, 2, {"process": "a:1:1"})
    assert not workspace.void_attempt(stage.id, 2), "a started attempt must be waited for"


def test_a_damaged_stage_record_is_refused_with_its_file(workspace: Workspace, plan: Plan) -> None:
    stage = claim(workspace, plan, "data")
    spec = workspace.layout.stage(stage.id).spec
    heartbeat = workspace.layout.attempt(stage.id, 1).heartbeat
    heartbeat.write_text("")
    assert workspace.read_heartbeat(stage.id, 1) is None, "an empty heartbeat is no error"
    for text, named in (('{"version": 1', r"spec\.json"), ('{"version": 99}', "version 99")):
        spec.write_text(text)
        with pytest.raises(WorkspaceError, match=named):
            workspace.read_record(stage.id)
    spec.unlink()
    with pytest.raises(WorkspaceError, match=rf"no spec.json.*delete {spec.parent}:"):
        workspace.read_record(stage.id)


@pytest.mark.parametrize(
    ("file", "way_out"),
    [
        ("stages/sft-1/attempts/0001/outcome.json", r"move it away \(`mv .*outcome\.json"),
        ("stages/sft-1/result.json", "delete {root}/stages/sft-1: "),
        ("runs/20261121/run.json", "delete {root}/runs/20261121: stages .* stay"),
        ("workspace.json", "another folder with `workspace=DIR`$"),
    ],
)
def test_a_damaged_file_has_a_cheap_fix(workspace: Workspace, file: str, way_out: str) -> None:
    path = workspace.root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{")
    with pytest.raises(WorkspaceError, match=way_out.format(root=workspace.root)):
        workspace.read_control(path)


#: Remains of a small file after a power cut or an edit.
DAMAGES = ["", "\0" * 64, "[]", '{"restart": "x", "outcome": 7}']


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["job", "started", "outcome", "intent", "resumed", "scheduler"])
def test_a_damaged_file_of_an_attempt_is_set_aside_and_the_rest_is_used(
    workspace: Workspace,
    plan: Plan,
    name: str,
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The stage has hours of checkpoints beside it."""
    monkeypatch.setattr(record_files, "_STILL_S", 0.0)
    stage = claim(workspace, plan, "data")
    paths = workspace.layout.attempt(stage.id, 1)
    workspace.start_attempt(stage.id, 1, {"process": OWNER, "started_at": "then"})
    atomic.write_json(paths.job, {"job_id": "7"})
    workspace.close_attempt(stage.id, 1, AttemptOutcome("preempted", "resume"))
    path = paths.control / f"{name}.json"  # earlier versions had the last two
    path.write_text(damage)

    looked_at = Workspace.read_only(workspace.root).read_record(stage.id)
    assert looked_at is not None
    assert path.read_text() == damage, "a reader changes nothing"
    for _ in range(2):
        record = Workspace.open(workspace.root).read_record(stage.id)
        assert [a.number for a in record.attempts] == [1]
    is_whole = damage == "[]" and name in ("job", "started", "resumed", "scheduler")
    is_whole |= damage == DAMAGES[-1] and name in ("resumed", "scheduler")
    kept = list(paths.control.glob(f"{path.name}.damaged-*"))
    assert [p.read_text() for p in kept] == ([] if is_whole else [damage])
    said = [r for r in caplog.records if "it is kept as" in r.getMessage()]
    assert len(said) == len(kept)
    if name != "outcome":
        assert record.attempts[0].outcome == AttemptOutcome("preempted", "resume")
    assert (record.state == "claimed") == (name == "outcome"), "an end that is lost is looked for"


def test_a_claim_is_lost(workspace: Workspace, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "_STILL_S", 0.0)
    stage = claim(workspace, plan, "data")
    workspace.start_attempt(stage.id, 1, {"process": OWNER})
    workspace.layout.attempt(stage.id, 1).intent.write_text("")
    assert not workspace.is_stale(stage.id, 1)
    attempt = workspace.read_attempt(stage.id, 1)
    assert (attempt.outcome.failure, attempt.outcome.decision) == ("killed", "resume")
    assert workspace.is_stale(stage.id, 1), "its worker leaves"
    assert claim(workspace, plan, "data", after=1) == stage


@pytest.mark.parametrize(("left", "says"), [(None, "is gone"), ("ab", "has 2 bytes instead of 3")])
def test_an_output_is_lost(workspace: Workspace, plan: Plan, left: str | None, says: str) -> None:
    stage = claim(workspace, plan, "data")
    weights = workspace.layout.attempt(stage.id, 1).output / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_text("abc")
    workspace.publish_result(
        stage.id, replace(result_of(1), files=(OutputFile("model.safetensors", 3, "00"),))
    )
    workspace.check_output(stage.id)
    assert "safetensors" not in observe_actions(plan, workspace)[0].reason
    weights.unlink() if left is None else weights.write_text(left)
    folder = workspace.layout.stage(stage.id).control
    with pytest.raises(WorkspaceError, match=rf"safetensors {says}.*delete {folder}:"):
        workspace.check_output(stage.id)
    assert says in observe_actions(plan, workspace)[0].reason


def test_files_of_an_earlier_version_are_read(workspace: Workspace, plan: Plan) -> None:
    stage = claim(workspace, plan, "data")
    paths = workspace.layout.attempt(stage.id, 1)
    intent = json.loads(paths.intent.read_text())
    said = {"config": intent.pop("config"), "inputs": {"data": "data-1"}, "batch": {"index": 0}}
    said |= {"scheduler": {"node": "n9"}, "resumed": {"step": 4, "from_attempt": 1}}
    del intent["inputs"]
    paths.intent.write_text(json.dumps(intent))
    for name, value in said.items():
        atomic.write_json(paths.control / f"{name}.json", value)
    for name in get_args(Part):
        assert workspace.part(paths, name) == said[name]
    attempt = workspace.read_attempt(stage.id, 1)
    assert (attempt.node, attempt.resumed_from_step) == ("n9", 4)


@pytest.mark.parametrize("apart", [False, True])
def test_a_job_of_earlier_code_finds_files(workspace: Workspace, plan: Plan, apart: bool) -> None:
    """A run keeps the code that it began with, whatever was installed since."""
    code = workspace.layout.code / "abc" / "infra" / "store"
    code.mkdir(parents=True)
    if apart:
        (code / "proof_records.py").touch()
    assert reads_parts_apart(workspace, "abc") == apart
    stage, inputs = plan.by_name["sft"], {"data": "data-1"}
    workspace.claim_attempt(stage, plan.config, inputs, StageClaim(OWNER, "local", 0, apart))
    folder = workspace.layout.attempt(stage.id, 1).control
    assert (folder / "config.json").exists() == apart
    if apart:
        assert json.loads((folder / "config.json").read_text()) == to_json(plan.config)
        assert json.loads((folder / "inputs.json").read_text()) == inputs


# ---------------------------------------------------------------- atomic files


def test_a_repeated_link_request_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS reports the second try; a backup may hold a link of its own besides."""
    real = os.link

    def linked_twice(source: Path, target: Path) -> None:
        real(source, target)
        real(source, tmp_path / "backup")
        raise FileExistsError(errno.EEXIST, "File exists", str(target))

    monkeypatch.setattr(os, "link", linked_twice)
    assert atomic.create_json(tmp_path / "a.json", {"v": 1})


def test_exclusive_writes_need_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "link", unsupported)
    assert atomic.create_json(tmp_path / "a.json", {"v": 1})
    assert not atomic.create_json(tmp_path / "a.json", {"v": 2})
    assert atomic.read_json(tmp_path / "a.json") == {"v": 1}


# ---------------------------------------------------------------- runs, code, provenance


def test_requests_to_cancel_add_up(workspace: Workspace, plan: Plan) -> None:
    run = run_record(workspace, plan).run

    def asked() -> object:
        found = workspace.cancel_asked(run)
        return None if found is None else found["stages"]

    assert asked() is None
    assert workspace.request_cancel(run, "ana@login1", ["sft"])
    assert not workspace.request_cancel(run, "bo@login2", ["sft"]), "asked for already"
    assert workspace.request_cancel(run, "bo@login2", ["data"])
    assert asked() == ["data", "sft"]
    assert workspace.request_cancel(run, "ana@login1")
    assert asked() == [], "the whole run"
    assert not workspace.request_cancel(run, "bo@login2", ["sft"])


def in_git(folder: Path, *words: str) -> None:
    me = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", "-C", str(folder), *me, *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a module of ours and something else; returns the module."""
    module = tmp_path / "infra" / "store" / "thing.py"
    module.parent.mkdir(parents=True)
    module.write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("one\n")
    (tmp_path / ".gitignore").write_text(".venv\n")
    in_git(tmp_path, "init", "-q")
    in_git(tmp_path, "add", "-A")
    in_git(tmp_path, "commit", "-qm", "first")
    return module


def test_only_a_checkout_of_refiner_itself_is_recorded(checkout: Path) -> None:
    """A user's own project with refiner in its `.venv`: its diff is private."""
    root = checkout.parents[2]
    assert checkout_of(checkout).dirty is False
    (root / "results.csv").write_text("1\n")
    assert checkout_of(checkout).dirty is False, "no job imports it"
    checkout.with_name("untracked.py").write_text("x = 2\n")
    assert checkout_of(checkout).dirty is True
    (root / "notes.txt").write_text("my private password\n")
    assert checkout_of(checkout).diff.count("my private password") == 1
    installed = root / ".venv" / "lib" / "site-packages" / "infra" / "store" / "thing.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("x = 1\n")
    assert checkout_of(installed) == (None, False, "")


# ---------------------------------------------------------------- explaining


@pytest.mark.parametrize("kind", ["data", "grpo"])
def test_a_newer_stage_version_is_the_first_reason(workspace: Workspace, kind: str) -> None:
    plan = make_plan(small_config("data", "grpo"), SOURCES)
    stage = plan.by_name[kind]
    assert stage.version == 2
    older = replace(stage, version=1, fingerprint="0" * 64)
    others = tuple(s for s in plan.stages if s.name != kind)
    claim(workspace, replace(plan, stages=(*others, older)), kind)
    first, *_ = explain_difference(stage, workspace)
    assert first.startswith("stage version: 1 → 2 (")
    found = {f.stage.name: f for f in observe_actions(plan, workspace)}
    assert (found[kind].action, found[kind].reason) == ("run", f"changed: {first}")


def test_an_older_run_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To continue it would mix the rules of two versions."""
    with monkeypatch.context() as before:
        for name, kind in KINDS.items():
            before.setitem(KINDS, name, replace(kind, version=1))
        older = RecordedRun(tmp_path / "runs", "judge.prompt=v1")
        older.data()
        older.train("sft")
        older.train("grpo")
    workspace = Workspace.read_only(tmp_path / "runs")
    rows = {s.name: s for s in RunWatcher(workspace, older.run, ask=False).observe().stages}
    assert (rows["grpo"].state, rows["evaluate-grpo"].state) == ("done", "waiting")
    assert workspace.read_record(older.stage("grpo").id) is not None
    with pytest.raises(ConfigurationError, match=r"this version of refiner differs in .*grpo \(a"):
        plan_of_run(workspace, older.run)


# ---------------------------------------------------------------- records


ATTEMPT = Attempt(1, "refiner-x", "local", "host:1:2", "2026-01-01T00:00:00Z")


def test_keys_of_a_newer_version_are_ignored_and_missing_ones_are_not() -> None:
    data = to_json(ATTEMPT)
    assert from_json(Attempt, {**data, "mood": "good"}) == ATTEMPT
    assert from_json(Attempt, {**data, "seconds": 3}).seconds == 3, "a whole number is a number"
    del data["comment"]
    with pytest.raises(TypeError, match="comment"):
        from_json(Attempt, data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("number", "one"),
        ("number", True),
        ("executor", None),
        ("outcome", "gone"),
        ("outcome", {"failure": 3, "decision": "stop"}),
    ],
)
def test_a_value_of_another_type_is_named_where_it_is_read(key: str, value: object) -> None:
    """Not where it is used, in another process, hours later."""
    with pytest.raises(TypeError, match=f"Attempt.{key}"):
        from_json(Attempt, {**to_json(ATTEMPT), key: value})
