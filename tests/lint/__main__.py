"""``python -m tests.lint``: all checks of the source tree; exit code 1 if something is found."""

from __future__ import annotations

import sys

from tests.lint import arrows, copies, marks, sizes, use

CHECKS = {
    "arrows": arrows.findings,
    "sizes": sizes.findings,
    "marks": marks.findings,
    "use": use.findings,
    "copies": copies.findings,
}


def main() -> int:
    """Run all checks and print the findings."""
    found = [finding for check in CHECKS.values() for finding in check()]
    for finding in found:
        print(finding)
    print(f"{len(found)} findings")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
