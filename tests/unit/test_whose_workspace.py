"""No code of other users is run: neither from their workspace, nor from one they can write to.

Strangers and colleagues are other users of this machine (``tests/support/users.py``).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flows.disk import disk_report
from infra.jobs.dispatcher import job_settings
from infra.orchestrator.observe import observe_actions
from infra.store.provenance import require_snapshot, snapshot_code
from infra.store.workspace import SHARED, Workspace
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.records import AttemptOutcome
from tests.support.command import ROOT, finished
from tests.support.plans import claim, fake_router, orchestrator_on, run_record, small_plan
from tests.support.users import COLLEAGUE, STRANGER, run_as

GROUP = 54_300


@pytest.fixture
def common() -> Iterator[Path]:
    """A folder like /tmp: all users may make files there, and touch only their own."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="refiner-common-"))
    folder.chmod(0o1777)
    umask = os.umask(0o022)
    yield folder
    os.umask(umask)
    shutil.rmtree(folder)


@pytest.fixture
def package(common: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Code that every user of the machine may read, to be pinned."""
    folder = common / "site" / "pinned_here"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "work.py").write_text("print('as it was')\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder.name


def make_workspace(root: str, package: str) -> str:
    workspace = Workspace.open(root)
    claim(workspace, small_plan("data"), "data")
    return snapshot_code(workspace, [package]).name


def open_it(root: str) -> str:
    try:
        Workspace.open(root)
    except WorkspaceError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------- strangers


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
def test_a_workspace_that_a_stranger_made_is_refused(common: Path, mode: int) -> None:
    def lay_a_trap(root: str) -> None:
        workspace = Workspace.open(root)
        workspace.layout.format_file.write_text('{"format": 1, "shared": true}')
        (workspace.layout.code / "infra").mkdir()
        for folder in (workspace.root, *workspace.root.iterdir()):
            if folder.is_dir():
                folder.chmod(mode)

    run_as(STRANGER, lay_a_trap, str(common / "ws"))
    for victim in (lambda f, *a: f(*a), lambda f, *a: run_as(COLLEAGUE, f, *a)):
        assert "cannot be trusted" in victim(open_it, str(common / "ws"))
    assert not list((common / "ws" / "runs").iterdir())


def test_reading_runs_no_program_of_other_users(common: Path, package: str) -> None:
    """`refiner disk` and `refiner report` follow the configuration that is recorded there."""

    def make(root: str) -> None:
        make_workspace(root, package)
        workspace = Workspace.open(root)
        run = run_record(workspace, small_plan("data"))
        probe = f"command:touch {common}/ran"
        workspace.write_run(replace(run, config={"disk": {"probe": probe, "pattern": "x"}}))

    run_as(STRANGER, make, str(common / "ws"))
    workspace = Workspace.read_only(common / "ws")
    (action,) = observe_actions(small_plan("data"), workspace)
    assert action.reason != "never run"
    with pytest.raises(WorkspaceError, match=f"belongs to user {STRANGER}"):
        workspace.require_trust()
    disk_report(common / "ws")
    assert not (common / "ran").exists()
    make(str(common / "own"))
    disk_report(common / "own")
    assert (common / "ran").exists(), "in one's own workspace it runs"


@pytest.mark.parametrize("inside", [".", "code"])
@pytest.mark.parametrize(
    ("mode", "declared", "refused"),
    [
        (0o755, False, False),
        (0o775, False, True),
        (0o775, True, False),
        (0o777, False, True),
        (0o777, True, True),
    ],
)
def test_a_writable_folder_is_refused(
    tmp_path, monkeypatch, inside, mode, declared, refused
) -> None:
    Workspace.open(tmp_path / "ws")
    (tmp_path / "ws" / inside).chmod(mode)
    if declared:
        monkeypatch.setenv(SHARED, f"/nowhere:{tmp_path / 'ws'}")
    said = open_it(str(tmp_path / "ws"))
    assert ("cannot be trusted" in said) == refused
    if refused:
        assert f"chmod go-w {tmp_path / 'ws' / inside}" in said


def test_a_careless_umask_lets_no_user_in(common: Path, package: str) -> None:
    """Else a stranger puts code or a pickle into a folder that a job reads."""
    run_as(COLLEAGUE, make_workspace, str(common / "ws"), package, umask=0)

    def write_everywhere(root: str) -> list[str]:
        done = []
        for folder, folders, names in os.walk(root):
            for name in (*folders, *names):
                try:
                    Path(folder, name).rename(Path(folder, "replaced"))
                    done.append(name)
                except PermissionError:
                    continue
            for path in (Path(folder, "planted.py"), *(Path(folder, n) for n in names)):
                try:
                    path.open("a").close()
                    done.append(str(path))
                except PermissionError:
                    continue
        return done

    assert run_as(STRANGER, write_everywhere, str(common / "ws")) == []


# ---------------------------------------------------------------- pinned code

MANGLED = ("changed", "added", "compiled", "taken away", "a link", "everybody's")


def mangle(snapshot: Path, how: str) -> None:
    module = snapshot / "pinned_here" / "work.py"
    if how == "changed":
        module.write_text("print('planted')\n")
    elif how == "added":
        (snapshot / "torch.py").write_text("print('planted')\n")
    elif how == "compiled":
        planted = module.parent / "__pycache__" / "work.cpython-311.pyc"
        planted.parent.mkdir()
        planted.write_bytes(b"planted")
        os.chown(planted, STRANGER, STRANGER) if os.geteuid() == 0 else planted.chmod(0o666)
    elif how == "taken away":
        module.unlink()
    elif how == "a link":
        (snapshot / "torch").symlink_to(snapshot / "pinned_here")
    else:
        module.chmod(0o666)


@pytest.mark.parametrize("how", MANGLED)
def test_changed_code_is_refused(tmp_path: Path, package: str, how: str) -> None:
    """A stranger may know the digest that a version of refiner will have."""
    workspace = Workspace.open(tmp_path / "ws")
    code = snapshot_code(workspace, [package])
    mangle(code, how)
    for use in (
        lambda: snapshot_code(workspace, [package]),
        lambda: require_snapshot(workspace, code.name),
    ):
        with pytest.raises(WorkspaceError, match="not the code that was pinned") as refusal:
            use()
        assert f"rm -r {code}" in refusal.value.fix
    shutil.rmtree(code)
    assert snapshot_code(workspace, [package]) == code


def test_compiled_files_of_python_are_no_change(tmp_path: Path, package: str) -> None:
    workspace = Workspace.open(tmp_path / "ws")
    code = snapshot_code(workspace, [package])
    run = [sys.executable, "-P", "-c", f"import {package}.work"]
    writes = {"PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(run, env={**os.environ, **job_settings(1, code), **writes}, check=True)
    assert list(code.rglob("*.pyc"))
    assert snapshot_code(workspace, [package]) == code


@pytest.mark.slow
def test_a_job_whose_code_is_gone_runs_no_other(tmp_path: Path) -> None:
    """Python passes over a folder that is not there, and imports what is installed."""
    workspace = Workspace.open(tmp_path / "ws")
    plan = small_plan("data")
    stage = claim(workspace, plan, "data")
    settings = job_settings(1, workspace.layout.code / "0123456789abcdef")
    settings["PYTHONPATH"] += f":{ROOT}"
    worker = [sys.executable, "-P", "-m", "flows.worker", "--workspace", str(workspace.root)]
    done = finished([*worker, stage.id, "1"], env={**os.environ, **settings})
    attempt = workspace.read_attempt(stage.id, 1)
    assert attempt.outcome, done.stderr
    assert "is gone" in attempt.outcome.message
    assert attempt.outcome.decision == "stop"
    assert done.code == WorkspaceError("").exit_code


def test_a_run_needs_the_code_that_it_began_with(tmp_path: Path) -> None:
    workspace, plan = Workspace.open(tmp_path / "ws"), small_plan("data")
    run = replace(run_record(workspace, plan), code="0123456789abcdef")
    with pytest.raises(WorkspaceError, match="is gone"):
        orchestrator_on(plan, workspace, fake_router(workspace), run=run).begin()
    code = snapshot_code(workspace)
    shutil.rmtree(code)
    run = replace(run, code=code.name)
    orchestrator_on(plan, workspace, fake_router(workspace), run=run).begin()
    assert (code / "infra").is_dir(), "this process has it still"


# ---------------------------------------------------------------- colleagues


def test_two_users_can_share(common: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One begins a stage, the other reads it and takes the next attempt."""
    monkeypatch.setenv(SHARED, str(common / "ws"))

    def begin(root: str) -> str:
        workspace = Workspace.open(root)
        stage = claim(workspace, small_plan("data"), "data")
        workspace.close_attempt(stage.id, 1, AttemptOutcome("killed", "resume", "gone"))
        return snapshot_code(workspace, [package]).name

    def go_on(root: str) -> list[str]:
        workspace = Workspace.open(root)
        stage = claim(workspace, small_plan("data"), "data", after=1)
        record = workspace.read_record(stage.id)
        ended = [a.outcome.message if a.outcome else "open" for a in record.attempts]
        return [*ended, snapshot_code(workspace, [package]).name]

    (common / "ws").mkdir()
    os.chown(common / "ws", STRANGER, GROUP)
    (common / "ws").chmod(0o2775)
    code = run_as(STRANGER, begin, str(common / "ws"), groups=(GROUP,), umask=0o002)
    told = run_as(COLLEAGUE, go_on, str(common / "ws"), groups=(GROUP,), umask=0o002)
    assert told == ["gone", "open", code]
