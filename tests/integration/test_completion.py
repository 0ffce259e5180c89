"""Completion: what a shell offers while somebody types `refiner …`."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.cli.main import COMMANDS, cli
from flows.starting.completing import candidates
from tests.support.command import ROOT, environment
from tests.support.recorded_run import RecordedRun
from tests.support.require import require

BASH = shutil.which("bash") or ""


def offered(line: str) -> list[str]:
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
        ("refiner pro", ["prove-resume", "protocols"]),
        ("refiner judge se", ["servers"]),
        ("refiner plan ti", ["tiny-tools", "tiny-zero3", "tiny"]),
        ("refiner run tiny --no", ["--no-server"]),
        ("refiner plan tiny see", ["seed="]),
        ("refiner plan tiny grpo.kl", ["grpo.kl_estimator="]),
        ("refiner plan tiny grpo.heal", ["grpo.health."]),
        ("refiner plan tiny grpo.health.max_k", ["grpo.health.max_kl="]),
        ("refiner plan tiny judge.kind=", ["judge.kind=lexical", "judge.kind=openai"]),
        ("refiner plan tiny grpo.active_sampling=t", ["grpo.active_sampling=true"]),
        ("refiner plan tiny stages=[sf", ["stages=[sft"]),
        ("refiner plan tiny sft.deepspeed_stage=n", ["sft.deepspeed_stage=null"]),
        ("refiner plan tiny dispatch.profile=gr", ["dispatch.profile=gres"]),
        ("refiner show grpo.kl", ["grpo.kl_estimator"]),
        ("refiner show grpo.beta tiny-z", ["tiny-zero3"]),
        ("refiner sweep kl-", ["kl-tiny"]),
        ("refiner rubrics show v", ["v3"]),
        ("refiner init --task a", ["agent"]),
        ("refiner completion f", ["fish"]),
        ("refiner plan nonsense=", []),
        ("refiner nonsense x", []),
        ("refiner plan 'half a quo", []),
    ],
)
def test_a_line_goes_on_as_it_can(line: str, wanted: list[str]) -> None:
    assert offered(line) == wanted


def test_every_command_is_offered_and_has_something_to_offer() -> None:
    assert offered("refiner ") == list(COMMANDS)
    for name in COMMANDS:
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


def test_files_are_offered_where_a_recipe_or_rows_are_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("mine/recipe.yaml", "mine/rows.jsonl", "top.yaml"):
        (tmp_path / name).write_text("")
    assert offered("refiner plan m") == ["mine/"]
    assert offered("refiner plan mine/") == ["mine/recipe.yaml"]
    assert offered("refiner plan tiny data.rl_path=mine/r") == [
        "data.rl_path=mine/recipe.yaml",
        "data.rl_path=mine/rows.jsonl",
    ]
    assert offered("refiner plan tiny workspace=m") == ["workspace=mine/"]


def test_it_answers_at_once_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from flows.cli.main import main\n"
        "main(['completion', 'bash', '--line', 'refiner plan tiny grpo.be'])\n"
        "heavy = {'torch', 'prefect', 'omegaconf', 'numpy', 'transformers', 'submitit', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    after = os.times()
    assert done.stdout.split() == ["grpo.beta=", "[]"]
    used = after.children_user - before.children_user
    assert used < 0.6, f"{used:.2f} s of CPU for one press of a key"


@pytest.fixture(scope="module")
def on_path(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which a shell finds `refiner`."""
    folder = tmp_path_factory.mktemp("bin")
    tool = folder / "refiner"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m flows.cli.main "$@"\n')
    tool.chmod(0o755)
    return {**environment(), "PATH": f"{folder}:{os.environ['PATH']}", "TERM": "dumb"}


@pytest.mark.parametrize(
    ("line", "breaks", "reply"),
    [
        ("refiner plan tiny grpo.kl_e", "=: ", "grpo.kl_estimator="),
        ("refiner plan tiny judge.kind=o", "=: ", "openai"),
        ("refiner plan tiny judge.kind=o", " ", "judge.kind=openai"),
        ("refiner plan tiny data.rl_path=builtin:s", "=: ", "synthetic"),
    ],
)
def test_bash_gets_what_stands_behind_the_sign_at_which_it_parts_words(
    line: str, breaks: str, reply: str, on_path: dict[str, str]
) -> None:
    script = (
        'eval "$(refiner completion bash 2>/dev/null)"\n'
        f"COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMP_WORDBREAKS='{breaks}'\n"
        "_refiner_complete refiner\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        [BASH, "--norc", "-c", script], capture_output=True, text=True, env=on_path, check=False
    )
    assert done.stdout.splitlines() == [reply], done.stderr


def typed(shell: list[str], setup: str, keys: str, wanted: str, env: dict[str, str]) -> str:
    """What a shell on a terminal shows after ``keys``."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        shell, stdin=follower, stdout=follower, stderr=follower, env=env, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    shown, deadline = "", time.monotonic() + 30
    try:
        os.write(leader, f"{setup}; PS1='rea''dy> '\n".encode())
        for awaited, then in (("ready> ", keys), (wanted, "")):
            while awaited not in shown and time.monotonic() < deadline:
                if select.select([leader], [], [], 0.1)[0]:
                    shown += os.read(leader, 65536).decode(errors="replace")
            if then:
                shown = ""
                os.write(leader, then.encode())
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    return shown


def test_the_tabulator_key_works_in_bash(on_path: dict[str, str]) -> None:
    shown = typed(
        [BASH, "--norc", "--noprofile", "-i"],
        'eval "$(refiner completion bash 2>/dev/null)"',
        "refiner plan tiny-z\tgrpo.kl_e\tkl4",
        "refiner plan tiny-zero3 grpo.kl_estimator=kl4",
        on_path,
    )
    assert "refiner plan tiny-zero3 grpo.kl_estimator=kl4" in shown


def test_the_tabulator_key_works_in_zsh(on_path: dict[str, str], tmp_path: Path) -> None:
    require("shells", shutil.which("zsh"), "no zsh here")
    shown = typed(
        ["zsh", "-f", "-i"],
        f"autoload -Uz compinit; compinit -D -d {tmp_path}/dump; "
        'eval "$(refiner completion zsh 2>/dev/null)"',
        "refiner plan tiny-z\tgrpo.kl_e\tkl4",
        "kl4",
        on_path,
    )
    assert "tiny-zero3 " in shown
    assert "kl_estimator=" in shown


def test_fish_completes_with_a_few_words_about_each(on_path: dict[str, str]) -> None:
    require("shells", shutil.which("fish"), "no fish here")
    script = "refiner completion fish 2>/dev/null | source; complete -C 'refiner plan tiny grpo.be'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script],
        capture_output=True, text=True, env=on_path, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("grpo.beta=\tKL coefficient"), done.stderr


def test_without_a_shell_it_goes_by_yours_and_says_how_to_install(
    on_path: dict[str, str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli.main", "completion"],
        capture_output=True, text=True, check=True, env={**on_path, "SHELL": "/usr/bin/zsh"},
    )  # fmt: skip
    assert done.stdout.startswith("#compdef refiner")
    assert "~/.zshrc" in done.stderr
