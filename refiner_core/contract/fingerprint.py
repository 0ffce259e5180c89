"""Fingerprints (a stage's identity as a hash), and seeds derived from the sample.

A stage's fingerprint covers its kind, the stage version, the identity fields that it depends on,
the digests of outside sources (data files, model weights, rubric sets, judge prompts) and the
fingerprints of its inputs. Execution fields never enter; a field at its ``legacy_value`` is left
out, so that fields added later keep old fingerprints valid.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.marks import walk


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no spaces, floats by ``repr``, NaN refused."""
    return _ENCODER.encode(value)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 hex of a JSON-ready value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def get_field(config: Any, path: str) -> Any:
    """The value at a dotted path."""
    return attrgetter(path)(config)


def identity_values(config: RecipeConfig, prefixes: Iterable[str]) -> dict[str, Any]:
    """Identity fields at or below ``prefixes`` as {dotted path: JSON-ready value}.

    Fields at their legacy value are left out (see the module docstring).
    """
    values: dict[str, Any] = {}
    for path, read, legacy_value in _identity_fields(tuple(prefixes)):
        value = read(config)
        if value == legacy_value:
            continue
        values[path] = list(value) if isinstance(value, tuple) else value
    return values


@functools.cache
def _identity_fields(
    prefixes: tuple[str, ...],
) -> tuple[tuple[str, Callable[[Any], Any], Any], ...]:
    """Path, getter and legacy value. Cached: a sweep uses the same sets thousands of times."""
    return tuple(
        (path, attrgetter(path), info.legacy_value)
        for path, info in walk(RecipeConfig)
        if info.mark == "identity" and any(path == p or path.startswith(p + ".") for p in prefixes)
    )


def stage_fingerprint(
    kind: str,
    version: int,
    identity: Mapping[str, Any],
    sources: Mapping[str, str],
    inputs: Mapping[str, str],
) -> str:
    """The fingerprint of a stage: 64 hex digits. People and paths use the first 12."""
    parts = {"identity": dict(identity), "inputs": dict(inputs), "sources": dict(sources)}
    return digest({**parts, "kind": kind, "version": version})


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any sequence of integers and names (SHA-256, stable across versions)."""
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
