"""What a model's files say about it, without loading it: configuration, weights, tokenizer.

In: a model reference. Out: :class:`ModelFiles`, read from a local folder or from the snapshot that
the Hub client has in its cache, or None where nothing is here yet. Imports nothing heavy and takes
milliseconds: a plan is made with it. What cannot be read is left to who loads the model, whose
words are better.
"""

from __future__ import annotations

import functools
import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import RefinerError
from refiner_core.generation.load import BUILTIN_PREFIX, resolve_ref

_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100 << 20
#: Up to here a tokenizer is parsed; of a larger one the ids are looked for, ten times as fast.
_PARSED_BYTES = 1 << 20
_MODEL = re.compile(rb'"model"\s*:\s*\{')
_VOCABULARY = re.compile(rb'"vocab"\s*:\s*\{')
_MERGES = re.compile(rb'"merges"\s*:\s*\[')
_ADDED_ID = re.compile(rb'"id"\s*:\s*(\d+)')
_VALUE = re.compile(rb'":\s*(\d+)\s*[,}]')


@dataclass(frozen=True)
class ModelFiles:
    """A folder with a model or tokenizer.

    ``whole`` is False where files may still be on their way (an unfinished download): what is
    missing then says nothing.
    """

    folder: Path
    whole: bool

    def has(self, *names: str) -> bool:
        """Whether one of these files is there."""
        return any((self.folder / name).is_file() for name in names)

    def json(self, name: str) -> Mapping[str, Any]:
        """A JSON file; empty where there is none that can be read."""
        return _json(self.folder / name, _state_of(self.folder / name))

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The part of ``config.json`` that is about text: all of it in plain language models."""
        config = self.json("config.json")
        part = config.get("text_config")
        return part if isinstance(part, dict) else config

    @property
    def missing_shards(self) -> list[str]:
        """Weight files that the index names and that are not there."""
        named = self.json(_INDEX).get("weight_map")
        files = set(named.values()) if isinstance(named, dict) else set()
        return sorted(str(n) for n in files if not (self.folder / str(n)).is_file())

    @property
    def cut_short(self) -> str | None:
        """A weight file that is shorter than its own header says."""
        for path in sorted(self.folder.glob("*.safetensors")):
            header = _header(path, _state_of(path))
            ends = [v["data_offsets"][1] for v in header.values() if "data_offsets" in v]
            if ends and path.stat().st_size < header[""]["begin"] + max(ends):
                return path.name
        return None

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors in safetensors files, by name."""
        found: dict[str, tuple[int, ...]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            header = _header(path, _state_of(path))
            found |= {n: tuple(v["shape"]) for n, v in header.items() if "shape" in v}
        return found

    @property
    def has_weights(self) -> bool:
        """Whether there is any file of weights, in a form that transformers loads."""
        patterns = ("*.safetensors", "pytorch_model*.bin", _INDEX)
        return any(next(self.folder.glob(p), None) for p in patterns)

    def id_from(self, words: int) -> int | None:
        """The highest id that the tokenizer gives, if it is ``words`` or more."""
        path = self.folder / "tokenizer.json"
        highest = _highest_id(path, _state_of(path), words)
        return highest if highest is not None and highest >= words else None

    def knows_token(self, text: str) -> bool:
        """Whether a token stands in ``tokenizer.json``; True where that cannot be read."""
        added = self.json("tokenizer_config.json").get("added_tokens_decoder")
        if isinstance(added, dict) and any(
            isinstance(token, dict) and token.get("content") == text for token in added.values()
        ):
            return True
        try:
            data = (self.folder / "tokenizer.json").read_bytes()
        except OSError:
            return True
        forms = {json.dumps(text, ensure_ascii=ascii_only) for ascii_only in (True, False)}
        return any(form.encode() in data for form in forms)


def model_files(ref: str, revision: str) -> ModelFiles | None:
    """The files of ``builtin:…``, a folder, or a Hub id whose snapshot is in the cache."""
    try:
        resolved = resolve_ref(ref)
    except RefinerError:
        return None  # whoever resolves sources says it
    if ref.startswith(BUILTIN_PREFIX) or Path(resolved).is_dir():
        return ModelFiles(Path(resolved), whole=True)
    repository = _hub_cache() / f"models--{resolved.replace('/', '--')}"
    try:
        commit = (repository / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    folder = repository / "snapshots" / commit
    if not (folder / "config.json").is_file():
        return None
    files = ModelFiles(folder, whole=False)
    on_their_way = next((repository / "blobs").glob("*.incomplete"), None) is not None
    whole = not on_their_way and files.has_weights and not files.missing_shards
    return ModelFiles(folder, whole)


def _hub_cache() -> Path:
    """Where the Hub client keeps snapshots, by its own rules."""
    if path := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(path).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.environ.get("HF_HOME") or f"{home}/huggingface"
    return Path(root).expanduser() / "hub"


def _state_of(path: Path) -> tuple[int, int]:
    """Changes with the file: what was read of it is remembered under this, for many trials."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


@functools.lru_cache(maxsize=64)
def _json(path: Path, state: tuple[int, int]) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@functools.lru_cache(maxsize=256)
def _header(path: Path, state: tuple[int, int]) -> Mapping[str, Any]:
    """A safetensors header, and under ``""`` where the data begins; empty where it is none."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER:
                return {}
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for value in header.values():
                value["shape"], value["data_offsets"][1]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error):
        return {}
    return {**header, "": {"begin": 8 + length}}


@functools.lru_cache(maxsize=16)
def _highest_id(path: Path, state: tuple[int, int], words: int) -> int | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) > _PARSED_BYTES:
        found = _highest_by_search(data)
        if found is not None and found < words:
            return found  # it may only take too much for an id, never too little
    return _highest_by_parsing(data)


def _highest_by_parsing(data: bytes) -> int | None:
    try:
        found = json.loads(data)
        vocabulary = found["model"]["vocab"]
        added = [int(token["id"]) for token in found.get("added_tokens") or ()]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return max([*added, *map(int, ids)], default=None)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _highest_by_search(data: bytes) -> int | None:
    """As by parsing, of a vocabulary that is a mapping: every value in it, and every added id."""
    model = _MODEL.search(data)
    vocabulary = _VOCABULARY.search(data, model.end()) if model else None
    if model is None or vocabulary is None:
        return None
    merges = _MERGES.search(data, vocabulary.end())
    values = _VALUE.findall(data, vocabulary.end(), merges.start() if merges else len(data))
    ids = _ADDED_ID.findall(data, 0, model.start()) + values
    if not values:
        return None
    longest = max(map(len, ids))
    return int(max(i for i in ids if len(i) == longest))
