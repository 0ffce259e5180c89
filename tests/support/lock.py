"""The packages of a report of pip as requirements with hashes: ``make lock`` writes them.

pip install --dry-run --ignore-installed --report REPORT … && python -m tests.support.lock REPORT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = """\
# What CI installs, by version and hash: Linux x86_64, Python 3.11, CPU. Written by `make lock`.
# Everything else goes by constraints.txt, which has the same versions.
"""


def requirements(report: dict[str, Any]) -> str:
    """Lines for ``pip install --require-hashes``, the project itself left out.

    Raises
    ------
    ValueError
        Nothing is known of a file that could be checked.
    """
    lines = []
    for item in report["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        if "dir_info" in item["download_info"]:
            continue
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if not digest:
            raise ValueError(f"pip reports no sha256 of {name} {version}")
        lines.append(f"{name}=={version} --hash=sha256:{digest}")
    return HEAD + "\n".join(sorted(lines, key=str.lower)) + "\n"


if __name__ == "__main__":
    print(requirements(json.loads(Path(sys.argv[1]).read_text())), end="")
