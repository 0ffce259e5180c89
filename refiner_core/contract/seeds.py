"""Seeds that derive from *what* is sampled, never from call order.

``derive_seed(run_seed, "rollout", step, prompt_index, sample_index)`` gives the same number
whatever was sampled before it, so that a step repeated after a crash repeats its samples.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any sequence of integers and names (SHA-256, stable across versions)."""
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
