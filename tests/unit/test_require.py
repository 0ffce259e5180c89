"""A missing tool skips a test, unless it is promised."""

from __future__ import annotations

import pytest
from _pytest.outcomes import Failed, Skipped

from tests.support.require import require


def test_what_is_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFINER_REQUIRE", "browser")
    require("browser", "/usr/bin/chromium", "no chromium")


def test_what_is_missing_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFINER_REQUIRE", "slurm,quota")
    with pytest.raises(Skipped, match="no chromium"):
        require("browser", None, "no chromium")


def test_what_is_promised_and_missing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFINER_REQUIRE", "slurm, browser")
    with pytest.raises(Failed, match="no chromium"):
        require("browser", None, "no chromium")
