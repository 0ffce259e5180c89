"""Publications of a few bytes, as stages make them: weights, configuration, card, evidence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from infra.publishing import FileToPublish, Publication
from infra.store.stage_records import EVIDENCE

RUN, OTHER_RUN = "aaaa1111", "bbbb2222"
REPO = "me/model"


def card(text: str = "no numbers yet") -> str:
    """A card that the Hub takes."""
    return f"---\nlicense: apache-2.0\n---\n# A model\n{text}\n"


def publication(
    folder: Path,
    step: int,
    *,
    final: bool = False,
    files: Mapping[str, bytes] | None = None,
    run: str = RUN,
    says: str = "no numbers yet",
    repo_id: str = REPO,
    only_card: bool = False,
) -> Publication:
    """What a stage publishes of a step; with ``only_card`` its card and evidence once more.

    ``files`` are those of the model; they are written below ``folder``.
    """
    own = {"model.safetensors": b"weights of step %d" % step, "config.json": b"{}"}
    folder = folder / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    weights = []
    for name, data in (files or own).items():
        (folder / name).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        weights.append(FileToPublish(name, len(data), digest, folder / name))
    evidence = {
        **{"format": 1, "kind": "refiner publication", "step": step, "final": final},
        **{"fingerprint": run, "facts": {"says": says}},
        "files": [{"path": f.name, "bytes": f.bytes, "sha256": f.sha256} for f in weights],
    }
    papers = [
        FileToPublish.of_text("README.md", card(says)),
        FileToPublish.of_text(EVIDENCE, json.dumps(evidence)),
    ]
    sent = papers if only_card else [*weights, *papers]
    message = f"Step {step}: numbers" if only_card else f"Step {step}"
    return Publication(repo_id, tuple(sent), step, final, run, message, only_card)
