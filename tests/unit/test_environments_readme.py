"""What the README of environments shows can be copied: the environment and the task in it work."""

from __future__ import annotations

import re
from pathlib import Path

import refiner_core.environments
from refiner_core.contract.sections.environment import EnvironmentConfig, UserConfig
from refiner_core.environments.checking import check_environment
from refiner_core.environments.protocol import FAILURES
from refiner_core.environments.registry import load_own

README = Path(refiner_core.environments.__file__).with_name("README.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, re.S)
    return str(found)


def test_the_shown_environment_does_what_the_protocol_asks(tmp_path: Path) -> None:
    file = tmp_path / "guess.py"
    file.write_text(block("python"))
    environment = load_own(EnvironmentConfig(name=f"{file}:Guess"), UserConfig())
    checked = check_environment(environment, ("train", "test"))
    assert not checked.errors
    assert checked.tasks == {"train": 5, "test": 5}


def test_all_classes_of_failure_are_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", README.partition("## Classes of failure")[2], re.M)
    assert tuple(rows[: len(FAILURES)]) == FAILURES
