"""Files that are sent to the Hub: progress, and the check of their hashes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from infra.hub import client
from infra.hub.client import operations
from infra.publishing import FileToPublish
from refiner_core.contract.types import Progress


def stored(folder: Path, data: bytes, name: str = "model.safetensors") -> FileToPublish:
    (folder / name).write_bytes(data)
    return FileToPublish(name, len(data), hashlib.sha256(data).hexdigest(), folder / name)


def never() -> bool:
    return False


def test_only_sent_bytes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "READ_BYTES", 8)
    monkeypatch.setattr(client, "_TELL_BYTES", 10)
    told: list[Progress] = []
    files = [stored(tmp_path, b"w" * 25), FileToPublish.of_text("README.md", "card")]
    large, small = operations(files, [], told.append, never, trusted=True)
    with large.as_file() as plain:
        assert plain.read() == b"w" * 25
    assert not told, "it was hashed, say, and not sent"
    with large.as_file(with_tqdm=True) as file:
        assert (file.read(10), file.read(5), file.read()) == (b"w" * 10, b"w" * 5, b"w" * 10)
    with small.as_file(with_tqdm=True) as file:
        assert file.read() == b"card"
    assert [(p.done, p.values["sent_bytes"]) for p in told] == [(0, 10), (0, 25), (1, 25), (2, 25)]


def test_a_hash_that_nobody_else_checks_is_computed_as_the_file_is_read(tmp_path: Path) -> None:
    """The Hub checks large files itself, unless the transfer is Xet; small ones are checked here,
    up to 10 MiB."""
    limit = 10 << 20
    files = [stored(tmp_path, bytes(limit), "small"), stored(tmp_path, bytes(limit + 1), "large")]

    def known(**how: Any) -> list[tuple[bool, bool]]:
        made = operations(files, ["old"], lambda _: None, never, **how)
        assert [o.path_in_repo for o in made] == ["small", "large", "old"]
        return [(o.is_large, o.upload_info.is_hashed) for o in made[:2]]

    assert known(trusted=True) == [(False, True), (True, True)]
    assert known(trusted=False) == [(False, True), (True, False)]
