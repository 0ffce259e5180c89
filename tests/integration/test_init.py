"""`refiner init`: what a newcomer gets, from flags and from a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import termios
import time
from pathlib import Path

import pytest

from flows.cli.main import main
from flows.running.calls import make_recipe_plan
from flows.starting.questions import read_partitions
from refiner_core.contract.loading import load_recipe
from refiner_core.data.synthetic import generate_rows
from tests.support.command import ROOT, command, environment

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
        (["--sft", "none"], "data grpo publish card"),
        (["--task", "agent"], "data sft sample rft grpo publish card"),
        (["--task", "agent", "--environment", f"{OWN}:lamps"], "data sample rft grpo publish card"),
        (["--task", "agent", "--sft", "none"], "data sample rft grpo publish card"),
        (["--task", "command"], "command publish"),
        (["--task", "evaluate"], "data"),
        (["--rubrics", "v3", "--judge", "http://127.0.0.1:9/v1"], "data sft grpo publish card"),
        (["--judge", "vllm", "--publish", "me/mine"], "judge"),
        ([*BIG, "--gpus", "0"], "fetch data sft grpo publish card"),
        ([*BIG, "--gpus", "1", "--sft", "none"], "fetch data grpo publish card"),
        ([*BIG, "--gpus", "2", "--judge", "vllm"], "fetch data sft judge grpo publish card"),
        ([*BIG, "--gpus", "8", "--where", "slurm"], "fetch data sft grpo publish card"),
        ([*BIG, "--task", "evaluate", "--gpus", "1"], "fetch data"),
        ([*BIG, "--task", "agent", "--gpus", "4"], "fetch data sft sample rft grpo publish card"),
        (
            [*BIG, "--task", "agent", "--environment", "tau2", "--gpus", "8"],
            "fetch data sft sample rft grpo publish card",
        ),
        ([*BIG, "--task", "agent", "--gpus", "1", "--where", "slurm"], "fetch data sft sample rft"),
        (["--task", "command", "--gpus", "4", "--where", "slurm"], "command publish"),
    ],
)
def test_every_combination_of_answers_is_ready_to_plan(
    here: Path, words: list[str], stages: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tunes = "command" not in words and "evaluate" not in words
    assert made("mine", "--yes", *words, *(["--sweep", "yes"] if tunes else [])) == 0
    shown = capsys.readouterr()
    plan = make_recipe_plan("mine/recipe.yaml")
    assert {*stages.split()} <= {s.name for s in plan.stages}
    assert "refiner run mine/recipe.yaml" in shown.err
    assert (here / "mine" / "sweep.yaml").exists() == tunes
    assert (here / "mine" / "cluster.yaml").exists() == ("slurm" in words)
    assert plan.config.recipe == "mine"
    assert plan.config.workspace == str(here / "mine" / "runs")


def test_rows_of_ones_own_are_read_at_once_and_found_from_anywhere(
    here: Path, rows: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert made("mine", "--yes", "--sft", "rows/sft.jsonl", "--rl", "rows/rl.jsonl") == 0
    fingerprints = [s.fingerprint for s in make_recipe_plan("mine/recipe.yaml").stages]
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    plan = make_recipe_plan("../mine/recipe.yaml")
    assert [s.fingerprint for s in plan.stages] == fingerprints
    assert plan.config.data.sft_path == str(rows["sft"])


def test_a_row_that_cannot_be_read_is_named_and_nothing_is_made(
    here: Path, rows: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows["rl"].write_text('{"conversations": []}\n')
    assert made("mine", "--yes", "--rl", "rows/rl.jsonl") == 3
    assert "rl.jsonl:1" in capsys.readouterr().err
    assert not (here / "mine").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "refinr"], "Did you mean 'refiner'"),
        (["--base", "nothing"], "--base"),
        (["--rl", "none"], "nothing to train or evaluate on"),
        (["--rl", "owner/rows"], "owner/rows@COMMIT"),
        (["--judge", "ftp://x"], "http://127.0.0.1:8000/v1"),
        (["--judge-model", "x"], "--judge-model would change nothing"),
        (["--partition", "gpu"], "--partition would change nothing"),
        (["--publish", "two/slashes/here"], "OWNER/NAME"),
        (["--task", "agent", "--environment", "tau2"], "one of: desk"),
        (["--rubrics", "v33"], "v3"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused_by_its_flag(
    here: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made("mine", "--yes", *words) == 2
    assert said in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_without_a_terminal_it_says_which_flags_it_needs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made("mine", "--task", "evaluate", "--base", "tiny") == 2
    said = capsys.readouterr().err
    assert "--rl … --rubrics … --judge … --where … --workspace …" in said
    assert "--yes" in said
    assert "--sft" not in said
    every = ["--rl", "builtin:synthetic", "--rubrics", "instance", "--judge", "lexical"]
    every += ["--where", "local", "--workspace", "runs"]
    assert made("mine", "--task", "evaluate", "--base", "tiny", *every) == 0


@pytest.mark.parametrize("name", ["recipe.yaml", "README.md", ".gitignore"])
def test_nothing_is_ever_overwritten(
    here: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / name).write_text("mine")
    assert made("--yes") == 2
    assert f"has {name} already" in capsys.readouterr().err
    assert [p.name for p in here.iterdir()] == [name]
    assert (here / name).read_text() == "mine"


def test_an_existing_folder_may_be_used(here: Path) -> None:
    (here / "train.py").write_text("")
    assert made("--yes", "--task", "command") == 0
    assert {p.name for p in here.iterdir()} == {
        *(".gitignore", "README.md", "recipe.yaml", "recipe.schema.json", "train.py")
    }


def test_a_recipe_that_cannot_be_planned_leaves_no_folder(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made("deep/mine", "--yes", "--task", "command", "--run", "train {modle}") == 2
    assert "{modle}" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_scripts_get_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert made("mine", "--yes", "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["files"] == ["recipe.yaml", "recipe.schema.json", ".gitignore", "README.md"]
    assert value["next"][-1] == "refiner run mine/recipe.yaml"
    assert [s["name"] for s in value["stages"]][:2] == ["data", "sft"]


def test_the_next_commands_of_its_readme_work(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_what_sinfo_lists_is_read() -> None:
    debug, gpu, long = read_partitions(SINFO)
    assert (debug.name, debug.is_default, debug.gpus, debug.max_time_min) == ("debug", True, 0, 30)
    assert (gpu.name, gpu.gpus, gpu.gpu_type, gpu.max_time_min) == ("gpu", 8, "a100", 2880)
    assert (long.gpus, long.gpu_type, long.max_time_min) == (2, "", None)


def test_a_cluster_offers_its_partitions(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


class Terminal:
    """The command on a terminal of its own, as a person would type."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.leader, follower = pty.openpty()
        self.process = subprocess.Popen(
            command("init", *words),
            stdin=follower, stdout=follower, stderr=follower,
            cwd=folder, env={**environment(), "PATH": "/nowhere"}, start_new_session=True,
            preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(follower)
        self.text = ""

    def until(self, wanted: str, timeout_s: float = 30) -> None:
        """Read until that is said."""
        deadline = time.monotonic() + timeout_s
        while wanted not in self.text:
            assert time.monotonic() < deadline, f"waited for {wanted!r}, read:\n{self.text}"
            self._read()

    def answer(self, question: str, text: str = "") -> None:
        """Type a line when asked."""
        self.until(question)
        self.text = ""
        os.write(self.leader, f"{text}\n".encode())

    def press_ctrl_c(self) -> None:
        os.write(self.leader, b"\x03")

    def end(self, press: bytes = b"") -> int:
        """Its exit code, once it has ended. A key is pressed until it has: a signal that comes
        between a prompt and the wait for a line waits with it for the next key."""
        pressed = time.monotonic()
        while self.process.poll() is None:
            self._read()
            if press and time.monotonic() - pressed > 2:
                os.write(self.leader, press)
                pressed = time.monotonic()
        self._read()
        os.close(self.leader)
        return self.process.returncode

    def _read(self) -> None:
        ready, _, _ = select.select([self.leader], [], [], 0.1)
        if ready:
            with contextlib.suppress(OSError):  # it has closed its side
                self.text += os.read(self.leader, 65536).decode(errors="replace")


def _own_terminal() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test in the background has it ignored
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_terminal_is_asked_question_by_question(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "mine")
    terminal.answer("task [refiner]:", "refine")
    terminal.answer("Did you mean 'refiner'")
    terminal.answer("base [tiny]:")
    terminal.answer("sft [builtin:synthetic]:", "none")
    terminal.answer("rl [builtin:synthetic]:")
    terminal.answer("rubrics [instance]:", "grounded-v1")
    for question in ("judge [lexical]:", "where [local]:", "workspace [", "publish [folder]:"):
        terminal.answer(question)
    terminal.answer("sweep [no]:", "y")
    terminal.until("refiner run mine/recipe.yaml")
    assert terminal.end() == 0
    config = load_recipe(str(tmp_path / "mine" / "recipe.yaml"))
    assert config.reward.static_rubrics == "grounded-v1"
    assert "sft" not in config.stages
    assert (tmp_path / "mine" / "sweep.yaml").exists()


@pytest.mark.parametrize("way", ["ctrl-c", "end of input", "kill"])
def test_leaving_in_the_middle_of_the_questions_leaves_nothing(tmp_path: Path, way: str) -> None:
    terminal = Terminal(tmp_path, "mine")
    terminal.answer("task [refiner]:")
    terminal.until("base [tiny]:")
    if way == "ctrl-c":
        terminal.press_ctrl_c()
    elif way == "end of input":
        os.write(terminal.leader, b"\x04")
    else:
        os.kill(terminal.process.pid, signal.SIGTERM)
    again = b"\x03" if way == "ctrl-c" else b""
    assert terminal.end(again) == (-signal.SIGTERM if way == "kill" else 6)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_in_the_middle_leaves_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open

    def failing(self: Path, mode: str = "r", **options: object) -> object:
        if mode == "w" and self.name == "README.md":
            raise OSError(28, "No space left on device", str(self))
        return real(self, mode, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", failing)
    assert made("deep/mine", "--yes") == 5
    assert list(here.iterdir()) == []
