"""One part of a certification: ``python -m flows.certify.part NAME FOLDER``.

In: ``FOLDER/order.json``. Out: a line that begins with :data:`MADE` for each check, as soon as it
is made; whatever else the part prints is its log.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from flows.certify.work import Order

ORDER, MADE = "order.json", "certified-check "
#: Part -> the module and function that make its checks, imported there: torch takes seconds.
_MADE_BY = {
    "numerics": ("device", "numeric_checks"),
    "ranks": ("processes", "rank_checks"),
    "speed": ("device", "speed_checks"),
    "servers": ("processes", "server_checks"),
    "faults": ("processes", "fault_checks"),
}
PARTS = tuple(_MADE_BY)


def main(name: str, folder: Path) -> None:
    """Make the checks of one part."""
    module, function = _MADE_BY[name]
    checks = getattr(importlib.import_module(f"flows.certify.{module}"), function)
    for found in checks(Order.read(folder / ORDER), folder):
        sys.stdout.write(f"\n{MADE}{json.dumps(asdict(found))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
