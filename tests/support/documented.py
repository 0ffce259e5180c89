"""Commands that the READMEs show: read from their ``bash`` blocks, and how each is tried in a test.

A line is run as it stands, by bash, in a folder that has what it speaks of. Where that would take
hours, a GPU or somebody's account, its :class:`Trial` says what is run in its place, or which test
runs it; there is no other way out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READMES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *(
        path
        for package in ("flows", "infra", "sweeps", "refiner_core")
        for path in sorted((ROOT / package).rglob("README.md"))
        if "models" not in path.parts  # cards of the shipped models
    ),
)


@dataclass(frozen=True)
class Shown:
    """One command of a README."""

    file: str
    text: str

    @property
    def id(self) -> str:
        """What pytest calls it."""
        return f"{self.file}: {self.text[:70]}"


def shown_commands() -> list[Shown]:
    """All commands of all READMEs in the order of their lines, each once and without comments."""
    found = []
    for path in READMES:
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                text = re.sub(r"\s+", " ", re.sub(r"(^|\s+)#\s.*$", "", line)).strip()
                if text and all(text != shown.text for shown in found):
                    found.append(Shown(str(path.relative_to(ROOT)), text))
    return found


def paths_named() -> list[tuple[str, str]]:
    """(README, path) of every file of ours that a README names in full."""
    found = []
    for path in READMES:
        names = re.findall(
            r"`((?:flows|infra|sweeps|refiner_core|tests)/[\w./-]+\.\w+)`", path.read_text()
        )
        found += [(str(path.relative_to(ROOT)), name) for name in names]
    return found


def links() -> list[tuple[str, str]]:
    """(README, target) of every link to a place in this repository."""
    found = []
    for path in READMES:
        targets = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
        found += [(str(path.relative_to(ROOT)), t) for t in targets if "://" not in t]
    return found


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a Markdown file's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M)
    plain = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return frozenset(head.strip().replace(" ", "-") for head in plain)
