"""What a card says of a proof that its training resumes exactly.

In: ``facts.proof``, the record of `refiner prove-resume` without what is private. Out: a note, made
from its numbers; the verdict is made again each time, and what is written of it is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from refiner_core.cards.facts import CardFacts
from refiner_core.cards.printed import Line, counted, number
from refiner_core.contract.errors import DataError
from refiner_core.contract.proofs import PROOF_VERSION, Comparison, ResumeProof
from refiner_core.contract.records import from_json, to_json

_HOW = {
    frozenset({"kill"}): " by kill -9",
    frozenset({"stop"}): " by requests to stop",
    frozenset({"kill", "stop"}): " by kill -9 and by requests to stop",
}


def public_proof(proof: ResumeProof) -> dict[str, Any]:
    """A proof as evidence has it: without where and with what settings of a machine it was made."""
    kept = replace(proof, overrides=(), changed={}, provenance={})
    return {**to_json(kept), "verdict": proof.verdict}


def read_proof(known: Mapping[str, Any]) -> ResumeProof | None:
    """The proof in a card's facts; None without one.

    Raises
    ------
    DataError
        It is none, or of a newer version.
    """
    if not known:
        return None
    try:
        if int(known["version"]) <= PROOF_VERSION:
            return from_json(ResumeProof, known)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"facts.proof is damaged ({error})",
            expected="a proof",
            fix="take the refiner.json that lies beside the card",
        ) from error
    raise DataError(
        f"facts.proof has version {known['version']}",
        expected=f"version {PROOF_VERSION} or older",
        fix="install the version of refiner that the card names",
    )


def resume_notes(facts: CardFacts) -> list[Line]:
    """One note where the stage was proven, none where not."""
    proof = read_proof(facts.proof)
    if proof is None:
        return []
    tried = Line("a run of ") + number(proof.steps, "proof.steps") + " steps of this stage, "
    tried = (
        tried + "interrupted " + counted(len(proof.interruptions), "proof.interruptions", "time")
    )
    tried = tried + _HOW.get(frozenset(i.how for i in proof.interruptions), "")
    if not proof.same_processes:
        tried = tried + " and resumed on another number of processes"
    if proof.verdict == "diverged":
        return ["Resume did not hold: " + tried + ", " + _parted(proof) + "."]
    names = ", ".join(c.quantity for c in proof.comparisons)
    if proof.verdict == "bitwise":
        return ["Resume was proven: " + tried + f", was bitwise the same ({names})."]
    text = "Resume was proven within tolerance: " + tried + ", was the same up to "
    text = text + number(_size(proof.largest), "proof.comparisons") + " where "
    text = text + number(_size(proof.tolerance), "proof.tolerance")
    return [text + f" was allowed ({names})."]


def proof_problems(facts: CardFacts) -> Iterator[str]:
    """What a proof says that does not follow from its own numbers, or is about another stage."""
    proof = read_proof(facts.proof)
    if proof is None:
        return
    said = facts.proof.get("verdict")
    if said != proof.verdict:
        yield f"proof.verdict is {said!r}, and its comparisons give {proof.verdict!r}"
    if facts.fingerprint and proof.fingerprint != facts.fingerprint:
        yield f"proof is of the stage {proof.fingerprint[:12]}, not of {facts.fingerprint[:12]}"
    if not proof.interruptions:
        yield "proof has no interruption, so that nothing was tried"
    for found in proof.comparisons:
        if not 0 <= found.differing <= found.compared or not found.compared:
            counts = f"{found.differing} of {found.compared}"
            yield f"proof: {counts} of {found.quantity} differ, which cannot be"


def _parted(proof: ResumeProof) -> Line:
    first: Comparison | None = proof.first
    assert first is not None, "a run that diverged differs somewhere"
    if first.first_step is None:
        return Line(f"ended with another {first.quantity}")
    text = Line(f"differed in its {first.quantity} from step ")
    return text + number(first.first_step, "proof.comparisons") + " on"


def _size(value: float | None) -> str:
    return f"{value:.3g}"
