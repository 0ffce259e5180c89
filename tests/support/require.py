"""Skips a test whose tool is missing, or fails it where that tool is promised (in CI)."""

from __future__ import annotations

import os

import pytest


def require(name: str, condition: object, reason: str) -> None:
    """Continue only if ``condition`` holds.

    Otherwise skip with ``reason``, or fail when ``REFINER_REQUIRE`` (a list with commas, such as
    ``slurm,quota,browser,prefect``) names ``name``.
    """
    if condition:
        return
    promised = {part.strip() for part in os.environ.get("REFINER_REQUIRE", "").split(",")}
    if name in promised:
        pytest.fail(f"REFINER_REQUIRE promises {name!r}, but: {reason}", pytrace=False)
    pytest.skip(reason)
