"""One part of a certification: ``python -m flows.certify.part NAME FOLDER``.

In: ``FOLDER/order.json``. Out: a line of JSON in ``FOLDER/checks.jsonl`` per check, as soon as it
is made; what the part prints is its log.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.certify.work import Order

CHECKS, ORDER = "checks.jsonl", "order.json"
#: Part -> the module and function that make its checks, imported there: torch takes seconds.
_MADE_BY = {
    "numerics": ("device", "numeric_checks"),
    "ranks": ("processes", "rank_checks"),
    "speed": ("device", "speed_checks"),
    "servers": ("processes", "server_checks"),
    "faults": ("processes", "fault_checks"),
    "hang": ("processes", "hang_checks"),
}
PARTS = tuple(_MADE_BY)


def main(arguments: list[str]) -> int:
    """Make the checks of one part."""
    name, folder = arguments[0], Path(arguments[1])
    order = Order.read(folder / ORDER)
    with (folder / CHECKS).open("a") as file:
        module, function = _MADE_BY[name]
        checks = getattr(importlib.import_module(f"flows.certify.{module}"), function)
        for found in checks(order, folder):
            file.write(json.dumps(asdict(found)) + "\n")
            file.flush()
    return 0


def read_checks(folder: Path) -> list[dict[str, Any]]:
    """Checks that a part has made so far; a line that is still being written is left out."""
    path = folder / CHECKS
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
