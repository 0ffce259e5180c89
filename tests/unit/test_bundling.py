"""`refiner bundle` and `unbundle`: the same run elsewhere, and nothing else from a file."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import api
from flows.cli.main import main
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError, DataError, RefinerError
from tests.bench.many_runs import write_runs


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REFINER_STATE_DIR", str(tmp_path / "state"))
    write_runs(tmp_path / "runs", 2)
    return tmp_path / "runs"


@pytest.mark.parametrize("data_root", [False, True])
def test_a_run_is_the_same_elsewhere(place: Path, tmp_path: Path, data_root: bool) -> None:
    (row, _) = api.list_rows(place)
    api.label_run(row.run, place, tags=["good"])
    (row, _) = api.list_rows(place)
    made = api.bundle_run(row.run, place, out=tmp_path / "b.tar.gz")
    other = tmp_path / "other"
    Workspace.open(other, tmp_path / "big" if data_root else None)
    found = api.unbundle(made.file, other)
    assert (found.run, len(found.stages), found.kept) == (row.run, 3, ())
    assert api.list_rows(other) == [row]
    assert not list((other / "trash").iterdir())
    with pytest.raises(ConfigurationError, match="has the run"):
        api.unbundle(made.file, other)


def test_stages_that_are_there_stay(place: Path, tmp_path: Path) -> None:
    first, second = (row.run for row in api.list_rows(place))
    for run in (first, second):
        api.bundle_run(run, place, out=tmp_path / f"{run}.tar.gz")
    api.unbundle(tmp_path / f"{first}.tar.gz", tmp_path / "other")
    assert api.unbundle(tmp_path / f"{second}.tar.gz", tmp_path / "other").kept == ("data-0000",)


def test_the_commands(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bundle", f"workspace={place}", "--json"]) == 0
    file = json.loads(capsys.readouterr().out)["file"]
    assert main(["unbundle", file, f"workspace={tmp_path / 'other'}"]) == 0
    assert main(["bundle", f"workspace={place}"]) == 2, "the file exists"


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
    place: Path, tmp_path: Path, change: Callable[[list[Any]], None]
) -> None:
    made = api.bundle_run(None, place, out=tmp_path / "b.tar.gz")
    other = tmp_path / "other"
    with pytest.raises(DataError):
        api.unbundle(rewritten(made.file, change), other)
    assert Workspace.read_only(other).run_ids() == []
    assert Workspace.read_only(other).stage_ids() == []
    assert not list((other / "trash").glob("*"))
    assert not (tmp_path / "out").exists()


def test_what_is_no_bundle_or_needs_too_much_space_is_refused(place: Path, tmp_path: Path) -> None:
    for content in (b"", b"text", gzip.compress(b"x" * 5000)):
        (tmp_path / "b").write_bytes(content)
        with pytest.raises(DataError):
            api.unbundle(tmp_path / "b", tmp_path / "other")
    made = api.bundle_run(None, place, out=tmp_path / "b.tar.gz")

    def huge(members: list[Any]) -> None:
        manifest = json.loads(members[0][1])
        manifest["files"][0][1] = 1 << 60
        members[0] = (members[0][0], json.dumps(manifest).encode())

    with pytest.raises(RefinerError, match="are free"):
        api.unbundle(rewritten(made.file, huge), tmp_path / "other")
