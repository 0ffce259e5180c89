"""Bad input ends in one paragraph, a documented exit code, and no lost work."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from tests.support.command import SMALL, Finished, refiner
from tests.support.quota import small_tmpfs

ROW: dict[str, Any] = {
    "conversations": [
        {
            "role": "user",
            "content": "<query>What is it?</query>\n<tool_output>\n"
            "<snippet id=S_1>It is it.</snippet>\n</tool_output>",
        }
    ],
    "rubrics": json.dumps(
        {"positive_rubrics": [{"title": "t", "description": "d"}], "negative_rubrics": []}
    ),
    "metadata": {"sample_id": "a", "tool_query": "What is it?", "refiner_mode": "answer_only"},
}
ONLY_DATA = ("stages=[data]", "data.sft_path=null")


def check_refusal(done: Finished, code: int, *says: str) -> None:
    """One paragraph on stderr with the error, what was expected and the fix; no traceback."""
    assert done.code == code, done.stderr
    assert "Traceback" not in done.stderr
    for text in says:
        assert text in done.stderr, done.stderr
    assert "Expected" in done.stderr


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["run", "my/recipe.yaml"], 2, ["my/recipe.yaml"]),
        (["run", "tiny", "grpo.pack_length=64"], 2, ["grpo.pack_length >= "]),
        (["plan", "tiny", "data.rl_path=gone.jsonl"], 3, ["gone.jsonl", "data.rl_path="]),
        (["plan", "tiny", "data.rl_path=who/what"], 2, ["data.rl_revision=COMMIT"]),
        (
            ["run", "tiny", "publish.which=listed"],
            2,
            ["`publish.steps` is []", "add publish.steps=[70]"],
        ),
        (
            ["run", "tiny", "dispatch.executor=slurm", "dispatch.profile=nowhere.yaml"],
            2,
            ["nowhere.yaml", "preemptible"],
        ),
        (["run", "tiny", "workspace=/proc/refiner"], 4, ["workspace=DIR"]),
        (["logs", "grpo"], 2, ["No run is recorded"]),
    ],
)
def test_refused_before_anything_starts(argv, code, says, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    check_refusal(Finished(main(argv), *capsys.readouterr()), code, *says)
    left = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "workspace.json"]
    assert left == [], "nothing half-written"


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = refiner("run", "tinny", "--debug", cwd=tmp_path)
    assert "Traceback" in done.stderr


def run_data(tmp_path: Path, text: str, *overrides: str) -> Finished:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    where = f"workspace={tmp_path}/runs"
    return refiner(
        "run", "tiny", where, f"data.rl_path={path}", *ONLY_DATA, *overrides, "--no-server"
    )


def test_rows_are_refused_by_line_and_taken_once_they_are_fixed(tmp_path: Path) -> None:
    refused = run_data(tmp_path, json.dumps(ROW) + "\n{broken\n")
    assert refused.code == 3
    assert "rows.jsonl:2" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert list((tmp_path / "runs").glob("stages/*/result.json")) == []
    text = json.dumps(ROW)
    rows = (
        text.replace("it?", f"it {n}?").replace('"sample_id": "a"', f'"sample_id": "{n}"')
        for n in range(10)
    )
    assert run_data(tmp_path, "\n".join(rows)).code == 0


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 3 MiB: enough to begin, not enough to finish."""
    with small_tmpfs(tmp_path / "full", mib=3) as folder:
        yield folder


@pytest.mark.quota
def test_a_full_disk_is_reported_before_anything_starts(full_disk: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (full_disk / "filler").write_bytes(b"x" * 4 * 2**20)
    words = ("run", "tiny", f"workspace={full_disk}/runs", *SMALL, "--no-server")
    done = refiner(*words, "disk.wait_min=0")
    check_refusal(done, 5)
