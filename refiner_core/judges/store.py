"""Judgements that are known already, in this process. The workspace's store is `infra`'s.

In: keys (:mod:`refiner_core.judges.calls`) and scored judgements. Out: what is known. A failed
judgement is never kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from refiner_core.contract.types import StoredJudgement

#: About 20 MB.
_LARGEST = 100_000


class MemoryStore:
    """Implements :class:`~refiner_core.contract.types.JudgementStore`; forgets the oldest."""

    def __init__(self, largest: int = _LARGEST) -> None:
        self._largest = largest
        self._known: OrderedDict[bytes, StoredJudgement] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, keys: Sequence[bytes]) -> list[StoredJudgement | None]:
        """What is known, in order."""
        with self._lock:
            return [self._known.get(key) for key in keys]

    def put(self, key: bytes, judgement: StoredJudgement) -> None:
        """Keep one."""
        with self._lock:
            self._known[key] = judgement
            if len(self._known) > self._largest:
                self._known.popitem(last=False)

    def flush(self) -> None:
        """Nothing: memory is all there is."""
