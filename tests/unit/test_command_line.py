"""The command line: wrong words and files with their answers, output, streams and signals.

Each case was once a traceback, a misleading answer, or an error that came hours later. The tests
run in this process, in an empty folder.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from tests.support.command import command, environment


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a newcomer stands."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


TYPED = {
    "paln tiny": "Did you mean 'plan'?",
    "plan tinny": "Did you mean 'tiny'?",
    "plan": "refiner plan [OPTIONS] RECIPE",
    "plan tiny --jsn": "'--json'",
    "plan grpo.beta=1 tiny": "`refiner plan tiny grpo.beta=1`",
    "plan tiny grpo.betta=1": "Did you mean 'grpo.beta'?",
    "plan tiny grpo.beta=abc": "0.001",
    "plan tiny grpo.beta = 1": "without spaces",
    "plan tiny stages=data": "stages='[data]'",
    "plan tiny environment.name=": "`environment.name`",
    "plan .": "folder",
    "nightly": "one of: check,",
    "recipes nope": "`refiner recipes --help`",
    "logs": "STAGE",
    "status nope": "`refiner run RECIPE`",
    "adopt . --copy --in-place": "leave one out",
    "environments show guess.py:": "FILE.py:NAME",
    "prove-resume tiny --interruptions 100 --steps 3": "at most 4",
    "plan tiny publish.license=Apache-2.0": "publish.license=other",
    "plan tiny publish.which=best publish.best_metric=rewad": "'reward'",
    "plan tiny publish.which=best evaluate.decoding=[sampled]": "one of: sampled",
}


@pytest.mark.parametrize("typed", TYPED)
def test_wrong_words_get_the_fix(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    shown = capsys.readouterr()
    assert TYPED[typed] in shown.err
    assert "bug in refiner" not in shown.err


FILES = {
    "syntax": ("include: tiny\ngrpo:\n  beta: [1\nseed: 3\n", "line 4, column 5: "),
    "tab": ("include: tiny\ngrpo:\n\tbeta: 1\n", "line 3, column 1: "),
    "twice": ("include: tiny\nseed: 1\nseed: 2\n", "line 3, column 1: found duplicate key seed"),
    "documents": ("include: tiny\n---\nseed: 2\n", "line 2, column 1: "),
    "empty": ("", "is empty"),
    "comment": ("# grpo:\n", "is empty"),
    "list": ("- a\n", "holds a list"),
    "itself": ("include: recipe.yaml\n", "includes itself"),
    "number": ("include: 3\n", "`include` of"),
    "nobody": ("include: nobody.yaml\n", "recipe.yaml names it"),
    "dots": ("include: tiny\ngrpo.beta: 1\n", "written with dots"),
    "bytes": ("include: t\udcffny\n", "not text in UTF-8"),
}


@pytest.mark.parametrize("kind", FILES)
def test_broken_recipes(kind: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = FILES[kind]
    (empty_folder / "recipe.yaml").write_bytes(text.encode(errors="surrogateescape"))
    assert main(["plan", "recipe.yaml"]) == 2
    assert said in capsys.readouterr().err


def test_a_file_is_no_workspace(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty_folder / "file").touch()
    for typed in (["plan", "tiny"], ["status"], ["logs", "grpo"]):
        assert main([*typed, "workspace=file"]) == 4
        assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("extra", [{"COLUMNS": "20"}, {"PYTHONIOENCODING": "ascii"}])
def test_narrow_and_plain_terminals_work(extra: dict[str, str], empty_folder: Path) -> None:
    line = [sys.executable, "-m", "flows.cli.main", "plan", "tiny", "description=\u00e9\u2026"]
    env = {k: v for k, v in environment().items() if k != "HOME"} | extra
    done = subprocess.run(line, env=env, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_during_imports_shows_no_traceback(empty_folder: Path) -> None:
    begin = empty_folder / "refiner"  # as the console script is called
    begin.write_text(
        "import flows.cli, os, signal, time\nprint('here', flush=True)\ntime.sleep(30)\n"
    )
    line = [sys.executable, str(begin)]
    process = subprocess.Popen(
        line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"here\n"
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGINT
    assert said == b""


# ---------------------------------------------------------------- output, streams and signals


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "tiny", "seed=x", "--json"],
        ["plan", "--json"],
        ["run", "tinny", "--json"],
        ["plan", "tiny", "description='", "--json"],
    ],
)
def test_a_refusal_is_json_with_json(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    error = json.loads(shown.out)
    assert error["exit_code"] == 2
    assert error["error"] in shown.err


def test_an_override_after_detach_is_not_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny", "--detach", "seed=x"]) == 2
    assert "`seed` is 'x'" in capsys.readouterr().err
    assert main(["run", "tiny", "seed=x", "--detach", "job"]) == 2
    assert "`seed` is 'x'" in capsys.readouterr().err


def test_closed_streams_work(tmp_path: Path) -> None:
    line = '"$@" <&- >&- 2>&-'
    argv = ["sh", "-c", line, "sh", *command("run", "tiny", "--dry-run")]
    assert subprocess.run(argv, cwd=tmp_path, env=environment(), check=False).returncode == 0


@pytest.mark.parametrize("ignored", [False, True])
def test_sighup_stops_but_not_under_nohup(
    ignored: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def run_recipe(*_args: Any, **_options: Any) -> None:
        seen.append(signal.getsignal(signal.SIGHUP))
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.running.calls.run_recipe", run_recipe)
    old = {n: signal.getsignal(n) for n in (signal.SIGHUP, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        assert main(["run", "tiny", f"workspace={tmp_path}"]) == 6
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    assert (seen[0] is signal.SIG_IGN) is ignored
    assert seen[0] is not signal.SIG_DFL
