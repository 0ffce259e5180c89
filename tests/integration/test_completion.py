"""Completion of command lines in bash, zsh and fish."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from flows.cli.main import cli
from flows.starting.completion import candidates
from tests.support.command import ROOT, environment, finished
from tests.support.recorded_run import RecordedRun
from tests.support.require import require


def offered(line: str) -> list[str]:
    """The words that are offered; ``FILE`` where a file may be named."""
    return [one.value for one in candidates(cli, line)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one recorded run."""
    root = tmp_path_factory.mktemp("completed") / "runs"
    RecordedRun(root)
    return root


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("refiner pro", ["protocols", "prove-resume"]),
        ("refiner plan tiny-", ["FILE", "tiny-tools", "tiny-zero3"]),
        ("refiner plan tiny see", ["seed=42"]),
        ("refiner plan tiny judge.kind=", ["judge.kind=lexical", "judge.kind=openai"]),
        ("refiner plan tiny judge.kind = l", ["lexical"]),  # as bash parts words
        ("refiner show grpo.kl", ["grpo.kl_estimator"]),
        ("refiner sweep kl-", ["FILE", "kl-tiny"]),
        ("refiner init --task a", ["agent"]),
        ("refiner nonsense x", []),
    ],
)
def test_a_line_is_completed(line: str, wanted: list[str]) -> None:
    assert offered(line) == wanted


def test_every_command_is_offered_and_has_something_to_offer() -> None:
    names = cli.list_commands(click.Context(cli))
    assert set(offered("refiner ")) == set(names)
    for name in names:
        assert "--help" in offered(f"refiner {name} --h"), name


def test_runs_and_stages_of_a_workspace_are_offered(workspace: Path) -> None:
    run = next(p.name for p in (workspace / "runs").iterdir())
    given = f"workspace={workspace}"
    assert run in offered(f"refiner status {given} ")
    assert run in offered(f"refiner resume {given} {run[:4]}")
    stages = offered(f"refiner logs {given} ")
    assert {"data", "sft", "grpo", "evaluate-sft"} <= set(stages)
    assert "evaluate-grpo" in offered(f"refiner cancel {given} {run} evaluate-g")
    assert offered(f"refiner logs workspace={workspace}/none gr") == []


def test_it_imports_nothing_heavy() -> None:
    script = (
        "import os, sys\n"
        "os.environ |= {'_REFINER_COMPLETE': 'bash_complete', 'COMP_CWORD': '3',\n"
        "    'COMP_WORDS': 'refiner plan tiny grpo.be'}\n"
        "from flows.cli.main import main\n"
        "main([])\n"
        "heavy = {'torch', 'prefect', 'omegaconf', 'numpy', 'transformers', 'submitit', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = finished([sys.executable, "-c", script])
    assert done.stdout.split() == ["plain,grpo.beta=0.001", "[]"]


@pytest.fixture(scope="module")
def on_path(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which a shell finds `refiner`."""
    folder = tmp_path_factory.mktemp("bin")
    tool = folder / "refiner"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m flows.cli.main "$@"\n')
    tool.chmod(0o755)
    return {**environment(), "PATH": f"{folder}:{os.environ['PATH']}", "TERM": "dumb"}


def typed(shell: list[str], setup: str, keys: str, wanted: str, env: dict[str, str]) -> str:
    """What a shell on a terminal shows after ``keys``."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        shell, stdin=follower, stdout=follower, stderr=follower, env=env, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    shown, deadline = "", time.monotonic() + 120
    try:
        os.write(leader, f"{setup}; PS1='rea''dy> '\n".encode())
        for awaited, then in (("ready> ", keys), (wanted, "")):
            while awaited not in shown and time.monotonic() < deadline:
                if select.select([leader], [], [], 0.1)[0]:
                    shown += os.read(leader, 65536).decode(errors="replace").replace("\a", "")
            if then:
                shown = ""
                os.write(leader, then.encode())
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    return shown


BASH = ("refiner plan tiny-z\tgrpo.kl_e\t4 judge.kind=o\t", "kl_estimator=kl4 judge.kind=openai")
ZSH = ("refiner plan tiny-z\tgrpo.be\t", "grpo.beta=0.001")


@pytest.mark.parametrize(
    ("shell", "setup", "keys", "wanted"),
    [
        ("bash --norc --noprofile -i", "", *BASH),
        ("zsh -f -i", "autoload -Uz compinit; compinit -D; ", *ZSH),
    ],
)
def test_the_tab_key_works(shell, setup, keys, wanted, on_path: dict[str, str]) -> None:
    name, *_ = words = shell.split()
    require("shells", shutil.which(name), f"no {name} here")
    setup += f'eval "$(refiner completion {name} 2>/dev/null)"'
    shown = typed(words, setup, keys, wanted, on_path)
    assert "tiny-zero3 " in shown
    assert wanted in shown


def test_fish_completes_with_a_few_words_about_each(on_path: dict[str, str]) -> None:
    require("shells", shutil.which("fish"), "no fish here")
    script = "refiner completion fish 2>/dev/null | source; complete -C 'refiner plan tiny grpo.be'"
    done = finished(["fish", "--no-config", "-c", script], env=on_path)
    assert done.stdout.startswith("grpo.beta=0.001\tKL coefficient"), done.stderr
