"""The command line itself, in this process: what goes to stdout, and with which exit code."""

from __future__ import annotations

import json

import pytest

from flows.cli.main import main


def test_without_arguments_it_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Usage: refiner")
    assert shown.err == ""


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "tiny", "seed=x", "--json"],
        ["plan", "--json"],
        ["run", "tinny", "--json"],
        ["plan", "tiny", "description='", "--json"],
    ],
)
def test_a_refusal_is_json_too_where_json_was_asked_for(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    error = json.loads(shown.out)
    assert error["exit_code"] == 2
    assert error["error"] in shown.err
