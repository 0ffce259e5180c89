"""The evidence of a card: ``refiner.json`` beside it.

In: :class:`CardFacts` and the files of a publication. Out: JSON from which anybody can make the
same card again, byte for byte::

    {"format": 1, "kind": "refiner publication", "step", "final", "fingerprint",
     "files": [{"path", "bytes", "sha256"}, …], "facts": {…}}

``files`` are those of the publication except README.md and refiner.json themselves. ``facts``
contains nothing private: names lose their folders, and no host, environment or secret is left.
Cards are made from these public facts, so that a card shows nothing beyond its evidence. The
conversion is idempotent.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refiner_core.cards.facts import AttemptNote, CardFacts, file_digest, public_name
from refiner_core.cards.public import (
    is_public,
    named_tree,
    plain_name,
    public_address,
    public_command,
    public_config,
    public_reports,
    public_text,
    public_tree,
)
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.marks import ABSENT, walk
from refiner_core.contract.records import OutputFile, to_json

EVIDENCE_FORMAT = 1
EVIDENCE_KIND = "refiner publication"
#: Files of a publication that its evidence omits.
_NOT_LISTED = ("README.md", "refiner.json")
#: Fields kept of each evaluation.
_OF_EVALUATIONS = (
    *("stage", "protocol", "protocol_name", "decoding", "metric", "value", "low", "high", "n"),
    *("numerator", "denominator", "interval", "samples_file", "under"),
)
#: Later facts: without them the evidence has its older form.
_ONLY_WHERE_ANY = ("proof", "certificate", "versions")


@dataclass(frozen=True)
class CardEvidence:
    """A parsed ``refiner.json``: the files of a publication and the facts of its card."""

    facts: CardFacts
    step: int
    final: bool
    fingerprint: str
    files: tuple[OutputFile, ...]


def facts_to_json(facts: CardFacts) -> dict[str, Any]:
    """The facts as JSON values, reduced to public ones."""
    tracking = {stage: public_address(address) for stage, address in facts.tracking.items()}
    special: dict[str, Any] = {
        "config": public_config(facts.config, {facts.stage, *facts.reports}),
        "command": public_command(facts.command),
        "reports": public_reports(facts.reports),
        "description": public_text(facts.description).strip(),
        "recipe_file": None if facts.recipe_file is None else file_digest(facts.recipe_file),
        "tracking": {stage: address for stage, address in tracking.items() if address},
        "template": facts.template,
        "repo_id": facts.repo_id,
        "base_model": None
        if facts.base_model is None
        else plain_name(public_name(facts.base_model)),
        "attempts": [public_tree(note._asdict()) for note in facts.attempts],
        "static_rubric_titles": named_tree(list(facts.static_rubric_titles)),
        "evaluations": [_evaluation(entry) for entry in facts.evaluations],
        "records": {fact: public_text(record) for fact, record in facts.records.items()},
    }
    return {
        f.name: special[f.name]
        if f.name in special
        else public_tree(to_json(getattr(facts, f.name)))
        for f in dataclasses.fields(facts)
        if f.name not in _ONLY_WHERE_ANY or getattr(facts, f.name)
    }


def _evaluation(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: named_tree(entry[key]) for key in _OF_EVALUATIONS if key in entry}


def facts_from_json(data: Mapping[str, Any]) -> CardFacts:
    """The facts written by :func:`facts_to_json`.

    Missing settings are newer ones: they get the value that was in effect for older runs.

    Raises
    ------
    DataError
        The data are of a newer version.
    """
    unknown = sorted({*data} - {f.name for f in dataclasses.fields(CardFacts)})
    if unknown:
        newer = "install the version of refiner that the card names"
        raise _unfit(f"has facts that this version does not know: {', '.join(unknown)}", newer)
    values: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in data.items()
    }
    values["config"] = _config(data["config"])
    values["attempts"] = tuple(AttemptNote(**note) for note in data.get("attempts", ()))
    return CardFacts(**values)


def _config(values: Mapping[str, Any]) -> RecipeConfig:
    later = {
        path: info.legacy_value
        for path, info in walk(RecipeConfig)
        if is_public(path, info) and path not in values and info.legacy_value is not ABSENT
    }
    return replace_fields(RecipeConfig(), {**later, **values})


def evidence_text(
    facts: CardFacts, files: Sequence[OutputFile], *, fingerprint: str | None = None
) -> str:
    """``refiner.json`` as text; the same facts and files give the same bytes.

    Parameters
    ----------
    files
        Files of the publication; README.md and refiner.json are left out here.
    fingerprint
        Of the stage that trained the weights, if not ``facts.fingerprint``.
    """
    listed = sorted((f for f in files if f.path not in _NOT_LISTED), key=lambda f: f.path)
    content = {
        "format": EVIDENCE_FORMAT,
        "kind": EVIDENCE_KIND,
        "step": facts.step,
        "final": facts.final,
        "fingerprint": facts.fingerprint if fingerprint is None else fingerprint,
        "files": to_json(listed),
        "facts": facts_to_json(facts),
    }
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def load_evidence(text: str) -> CardEvidence:
    """Read ``refiner.json``.

    Raises
    ------
    DataError
        It is no evidence of a card, of a newer format, or damaged.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unfit(f"is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("kind") != EVIDENCE_KIND:
        raise _unfit("is not the evidence of a card")
    if content.get("format") != EVIDENCE_FORMAT:
        newer = "install the version of refiner that wrote it"
        raise _unfit(f"has format {content.get('format')}", newer)
    try:
        return CardEvidence(
            facts=facts_from_json(content["facts"]),
            step=int(content["step"]),
            final=bool(content["final"]),
            fingerprint=str(content["fingerprint"]),
            files=tuple(
                OutputFile(f["path"], f["bytes"], f["sha256"]) for f in content.get("files", ())
            ),
        )
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unfit(f"is incomplete or damaged ({error})") from error


def _unfit(why: str, fix: str = "use the refiner.json beside the card") -> DataError:
    expected = f"kind {EVIDENCE_KIND!r}, format {EVIDENCE_FORMAT}"
    return DataError(f"The evidence {why}", expected=expected, fix=fix)
