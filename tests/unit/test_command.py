"""The command line itself, in this process: what goes to stdout, and with which exit code."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from tests.support.command import command, environment


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


def test_closed_streams_are_no_bug(tmp_path: Path) -> None:
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
