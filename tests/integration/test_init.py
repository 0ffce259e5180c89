"""`refiner init`: a folder with recipe, profile and README from flags."""

import json
import shlex
from pathlib import Path

import pytest

from flows.cli.main import main
from flows.running.calls import make_recipe_plan
from refiner_core.contract.loading import load_recipe
from refiner_core.data.synthetic import generate_rows
from tests.support.command import ROOT

OWN = ROOT / "tests" / "support" / "own_environment.py"
SINFO = """debug*|(null)|30:00
gpu|gpu:a100:8(S:0-1)|2-00:00:00
gpu|gpu:a100:4|2-00:00:00
long|gpu:2|infinite
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, on a machine without Slurm and GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    return tmp_path


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Path]:
    """Rows of one's own, beside nothing that matters."""
    folder = tmp_path / "rows"
    folder.mkdir()
    found = {}
    for which in ("sft", "rl"):
        found[which] = folder / f"{which}.jsonl"
        texts = [json.dumps(row) for row in generate_rows(which, 30, 0)]
        found[which].write_text("\n".join(texts) + "\n")
    return found


def made(*words: str) -> int:
    return main(["init", *words])


BIG = ("--base", "Qwen/Qwen3-4B")


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        ([], "data sft grpo publish card"),
        (["--task", "agent"], "data sft sample rft grpo publish card"),
        (["--task", "agent", "--environment", f"{OWN}:lamps"], "data sample rft grpo publish card"),
        (["--task", "command"], "command publish"),
        (["--rubrics", "v3", "--judge", "http://127.0.0.1:9/v1"], "data sft grpo publish card"),
        (["--judge", "vllm", "--publish", "me/mine"], "judge"),
        ([*BIG, "--gpus", "2", "--judge", "vllm"], "fetch data sft judge grpo publish card"),
        (
            [*BIG, "--task", "agent", "--environment", "tau2", "--gpus", "8"],
            "fetch data sft sample rft grpo publish card",
        ),
        ([*BIG, "--task", "agent", "--gpus", "1", "--where", "slurm"], "fetch data sft sample rft"),
    ],
)
def test_every_combination_of_answers_is_ready_to_plan(here: Path, words, stages, capsys) -> None:
    assert made("mine", "--yes", *words) == 0
    shown = capsys.readouterr()
    plan = make_recipe_plan("mine/recipe.yaml")
    assert {*stages.split()} <= {s.name for s in plan.stages}
    assert "refiner run mine/recipe.yaml" in shown.err
    assert (here / "mine" / "cluster.yaml").exists() == ("slurm" in words)
    assert plan.config.recipe == "mine"
    assert plan.config.workspace == str(here / "mine" / "runs")


def test_own_rows_are_found_from_any_folder(here: Path, rows: dict[str, Path], monkeypatch) -> None:
    assert made("mine", "--yes", "--sft", "rows/sft.jsonl", "--rl", "rows/rl.jsonl") == 0
    fingerprints = [s.fingerprint for s in make_recipe_plan("mine/recipe.yaml").stages]
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    plan = make_recipe_plan("../mine/recipe.yaml")
    assert [s.fingerprint for s in plan.stages] == fingerprints
    assert plan.config.data.sft_path == str(rows["sft"])


def test_an_unreadable_row_is_named(here: Path, rows: dict[str, Path], capsys) -> None:
    rows["rl"].write_text('{"conversations": []}\n')
    assert made("mine", "--rl", "rows/rl.jsonl") == 3
    assert "rl.jsonl:1" in capsys.readouterr().err
    assert not (here / "mine").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "refinr"], "Did you mean 'refiner'"),
        (["--rl", "owner/rows"], "owner/rows@COMMIT"),
        (["--judge", "ftp://x"], "http://127.0.0.1:8000/v1"),
        (["--partition", "gpu"], "--partition would change nothing"),
        (["--task", "agent", "--environment", "tau2"], "one of: desk"),
        (["--task", "command", "--run", "train {modle}"], "{modle}"),  # it cannot be planned
    ],
)
def test_a_wrong_answer_is_refused_and_leaves_no_folder(here: Path, words, said, capsys) -> None:
    assert made("deep/mine", "--yes", *words) == 2
    assert said in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_nothing_is_ever_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = here / "README.md"
    file.write_text("mine")
    assert made("--yes") == 2
    assert "has README.md already" in capsys.readouterr().err
    assert list(here.iterdir()) == [file]
    assert file.read_text() == "mine"


def test_scripts_get_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert made("mine", "--yes", "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["files"] == ["recipe.yaml", "recipe.schema.json", ".gitignore", "README.md"]
    assert value["next"][-1] == "refiner run mine/recipe.yaml"
    assert [s["name"] for s in value["stages"]][:2] == ["data", "sft"]


def test_the_next_commands_of_its_readme_work(here: Path, monkeypatch, capsys) -> None:
    assert made("mine", "--yes", "--workspace", "apart") == 0
    monkeypatch.chdir(here / "mine")
    text = (here / "mine" / "README.md").read_text()
    commands = [line.partition("#")[0] for line in text.splitlines() if line.startswith("refiner ")]
    looking = [c for c in commands if c.split()[1] in ("plan", "show", "status")]
    assert len(looking) == 4
    for one in looking:
        assert main(shlex.split(one)[1:]) in (0, 2), one  # no run to show the status of yet
    assert f"workspace={here / 'apart'}" in text
    capsys.readouterr()


def test_a_cluster_offers_its_partitions(here: Path, monkeypatch, capsys) -> None:
    tools = here / "tools"
    tools.mkdir()
    for name, said in (("sinfo", SINFO), ("sacctmgr", "lab\nlab\nother\n")):
        (tools / name).write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{said}END\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    assert made("mine", "--yes", *BIG) == 0
    profile = (here / "mine" / "cluster.yaml").read_text()
    assert "partition: gpu" in profile
    assert "account: lab" in profile
    assert "max_gpus: 8" in profile
    config = load_recipe("mine/recipe.yaml")
    assert config.dispatch.profile == str(here / "mine" / "cluster.yaml")
    assert config.grpo.resources.gpus == 8
    assert made("other", "--yes", "--partition", "gpuu") == 2
    assert "Did you mean 'gpu'" in capsys.readouterr().err


def test_a_disk_that_fails_in_the_middle_leaves_nothing(here: Path, monkeypatch) -> None:
    real = Path.open

    def failing(self: Path, mode: str = "r", **options: object) -> object:
        if mode == "w" and self.name == "README.md":
            raise OSError(28, "No space left on device", str(self))
        return real(self, mode, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", failing)
    assert made("deep/mine", "--yes") == 5
    assert list(here.iterdir()) == []
