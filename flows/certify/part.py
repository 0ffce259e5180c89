"""One part of a certification: ``python -m flows.certify.part NAME FOLDER``.

In: ``FOLDER/order.json``. Out: a line of JSON in ``FOLDER/checks.jsonl`` per check, as soon as it
is made; what the part prints is its log.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.certify.work import Order
from refiner_core.contract.proofs import CertifiedCheck

CHECKS, ORDER = "checks.jsonl", "order.json"


def main(arguments: list[str]) -> int:
    """Make the checks of one part."""
    name, folder = arguments[0], Path(arguments[1])
    order = Order.read(folder / ORDER)
    with (folder / CHECKS).open("a") as file:
        for found in _checks_of(name)(order, folder):
            file.write(json.dumps(asdict(found)) + "\n")
            file.flush()
    return 0


def _checks_of(name: str) -> Callable[[Order, Path], Iterator[CertifiedCheck]]:
    """The checks of a part; each imports what it needs, since torch takes seconds."""
    if name == "numerics":
        from flows.certify.device import numeric_checks

        return lambda order, folder: numeric_checks(order)
    if name == "ranks":
        from flows.certify.processes import rank_checks

        return rank_checks
    if name == "speed":
        from flows.certify.device import speed_checks

        return speed_checks
    if name == "servers":
        from flows.certify.processes import server_checks

        return server_checks
    from flows.certify.processes import fault_checks, hang_checks

    return hang_checks if name == "hang" else fault_checks


def read_checks(folder: Path) -> list[dict[str, Any]]:
    """What a part has found so far; a line that is still being written is left out."""
    path = folder / CHECKS
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
