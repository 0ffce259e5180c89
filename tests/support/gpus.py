"""GPUs for tests: names that no other process of this machine leases, and a driver's list."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from infra.host import gpus


def invented(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """Names of so many GPUs, as all that this process and its children may use."""
    mark = secrets.token_hex(6)
    names = [f"GPU-{mark}-{number}" for number in range(count)]
    monkeypatch.setenv(gpus.VISIBLE, ",".join(names))
    return names


def fake_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, listed: str, code: int = 0) -> None:
    """Put an `nvidia-smi` first on PATH that lists these GPUs."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}\nEND\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(gpus, "_listed", gpus._listed.__wrapped__)
