"""Adopting the folder of another trainer: whole models, and no workspace of refiner."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from flows.adopting import adopt_run
from infra.external.checkpoints import contents_damage
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError

PAGES = np.arange(1, 64 * 1024 + 1, dtype=np.float32).reshape(256, 256)


def safetensors(path: Path, **tensors: tuple[str, np.ndarray]) -> Path:
    """A file with arrays under the names of types that NumPy need not know."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        begin, data = len(data), data + array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def checkpoint(run: Path, step: int) -> Path:
    folder = run / f"checkpoint-{step}"
    safetensors(folder / "model.safetensors", w=("F32", PAGES), b=("F32", np.zeros(4096, "<f4")))
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def make_hole(path: Path) -> None:
    """As a file system leaves a file that was being written when its node died."""
    size = path.stat().st_size
    os.truncate(path, size // 4)
    os.truncate(path, size)


def make_nan(path: Path) -> None:
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    data[8 + length + 400 : 8 + length + 404] = struct.pack("<f", float("nan"))
    path.write_bytes(data)


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(("harm", "says"), [(make_hole, "is empty"), (make_nan, "holds NaN")])
def test_a_checkpoint_without_numbers_is_skipped(tmp_path: Path, harm: object, says: str) -> None:
    """Its header is whole, so it would be published and evaluated."""
    run = tmp_path / "run"
    checkpoint(run, 10)
    harm(checkpoint(run, 20) / "model.safetensors")
    where = [f"workspace={tmp_path / 'ws'}"]
    for dry_run in (True, False):
        report = adopt_run(run, where, dry_run=dry_run)
        assert report["step"] == 10
        assert [c["complete"] for c in report["checkpoints"]] == [True, False]
        assert says in report["checkpoints"][1]["note"]
    with pytest.raises(ConfigurationError, match=rf"model\.safetensors: .*{says}"):
        adopt_run(run, where, step=20)


def test_zeros_of_trained_models_are_no_damage(tmp_path: Path) -> None:
    """Biases, rows of words that never came, and most of a pruned matrix."""
    words = PAGES.copy()
    words[150:] = 0
    pruned = np.where(PAGES % 10 == 0, PAGES, 0).astype("<f4")
    zeros = np.zeros((1, 8192), "<f4")
    path = safetensors(
        tmp_path / "model.safetensors",
        words=("F32", words),
        pruned=("F32", pruned),
        bias=("F32", zeros),
    )
    assert contents_damage(path) is None


@pytest.mark.parametrize("offsets", [[0, 7], [-9, 11], [16, 0], "no", None])
def test_a_wrong_header_is_damage(tmp_path: Path, offsets: object) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": offsets}})
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\1" * 16)
    assert contents_damage(path)


# ---------------------------------------------------------------- links


def test_a_workspace_of_refiner_is_not_adopted(tmp_path: Path) -> None:
    theirs = Workspace.open(tmp_path / "theirs")
    with pytest.raises(ConfigurationError, match=f"refiner resume workspace={theirs.root}"):
        adopt_run(theirs.root, [f"workspace={tmp_path / 'ws'}"])
