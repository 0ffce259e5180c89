"""Proofs that try every operation of a life: each test run tries a share of them.

``REFINER_THOROUGH=1`` (`make prove`) tries them all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

THOROUGH = bool(os.environ.get("REFINER_THOROUGH"))


def share(count: int, of: int, part: int = 0) -> Sequence[int]:
    """Numbers from 1 to ``count``: each ``of``-th, beginning with a ``part`` of its own."""
    return range(1, count + 1) if THOROUGH else range(1 + part % of, count + 1, of)
