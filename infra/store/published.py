"""What of ours lies in a published folder or revision, by its own evidence file.

In: a place, or the bytes of its ``refiner.json``. Out: of which step it is and which files
belong to it; and what is missing there of what a stage's report says it has put there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.host.reading import again, exists
from infra.store import atomic
from refiner_core.contract.records import OutputFile, from_json

#: The file in every publication that says what it consists of and what its card was made from.
EVIDENCE = "refiner.json"
CARD = "README.md"
#: The manifest of publications that are older than the evidence file.
MARKER = ".refiner.json"
KIND = "refiner publication"
_PAPERS = (CARD, EVIDENCE)


@dataclass(frozen=True)
class Lying:
    """A publication of ours.

    Attributes
    ----------
    step, fingerprint
        Of its weights; None for one that says neither (older than the evidence file).
    files
        Without the card and the evidence file, which change when evaluations come in.
    """

    step: int | None
    fingerprint: str | None
    files: tuple[OutputFile, ...]

    @property
    def names(self) -> frozenset[str]:
        """All files that refiner has put there."""
        return frozenset({CARD, EVIDENCE, *(f.path for f in self.files)})


def read_evidence(text: str | bytes | None) -> Lying | None:
    """What an evidence file says; None if there is none, or if it is not of refiner."""
    try:
        said: Any = json.loads(text or "null")
        if not isinstance(said, dict) or said.get("kind") != KIND:
            return None
        files = tuple(OutputFile(f["path"], f["bytes"], f["sha256"]) for f in said["files"])
        return Lying(int(said["step"]), str(said["fingerprint"]), files)
    except (ValueError, KeyError, TypeError):
        return None


def lying_at(place: Path) -> Lying | None:
    """What lies at a place, if it is ours; also what older versions have put there."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return read_evidence(again((place / EVIDENCE).read_bytes))
    old: dict[str, Any] | None = atomic.read_json(place / MARKER)
    if old is None:
        return None
    found = (from_json(OutputFile, f) for f in old["files"])
    return Lying(None, None, tuple(f for f in found if f.path not in _PAPERS))


def target_damage(report: Mapping[str, Any]) -> str | None:
    """What a target no longer has of what a publish or card stage put there; None if all is there.

    A Hub is not asked: nothing is known to be gone. A folder is known by its own manifest. Card and
    evidence are replaced by later stages of the same publication, so that their content is looked
    at only where a report tells of nothing else.
    """
    if "target" not in report or report.get("where", "folder") != "folder":
        return None
    target = Path(str(report["target"]))
    weights = [f for f in report.get("files", ()) if f["path"] not in _PAPERS]
    wanted = {f["path"]: f["sha256"] for f in weights}
    if not wanted:
        wanted[CARD] = hashlib.sha256(str(report["card"]).encode()).hexdigest()
    try:
        if not exists(target):
            return f"{target} is gone"
        lying = lying_at(target)
        there = {f.path: f.sha256 for f in lying.files} if lying else {}
        gone = [name for name in (*wanted, CARD) if not exists(target / name)]
        if CARD in wanted and not gone:
            there[CARD] = hashlib.sha256(again((target / CARD).read_bytes)).hexdigest()
    except (OSError, ValueError) as error:
        return f"{target} cannot be read ({error})"
    if gone:
        return f"{target / gone[0]} is gone"
    for name, digest in wanted.items():
        if there.get(name) != digest:
            return f"{target / name} has been replaced by another publication"
    for file in weights:
        path = target / file["path"]
        if (size := again(path.stat).st_size) != file["bytes"]:
            return f"{path} has {size} bytes instead of {file['bytes']}"
    return None
