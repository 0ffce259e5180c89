"""Fixtures that tests of several folders share: an empty workspace, a Hub on loopback."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store.workspace import Workspace
from tests.support.git_hub import LoopbackHub


def pytest_collection_finish() -> None:
    """Leave what has been imported out of garbage collections from now on."""
    gc.freeze()


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """An empty workspace."""
    return Workspace.open(tmp_path / "ws")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A Hub that this process talks to, with a token that may write."""
    with LoopbackHub(tmp_path / "hub") as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_TOKEN", found.token)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield found
