"""Fixtures of tests that start no real programs."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def unsynced(request: pytest.FixtureRequest) -> Iterator[None]:
    """No waiting for the disk: files of these tests need not outlive a power cut. On a real quota
    it is the wait that meets the limit."""
    if "quota" in request.keywords:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
