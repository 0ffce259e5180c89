"""What a card says of the hardware that its model was trained on.

In: ``facts.certificate``, of the record of `refiner certify`. Out: a note, made from its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refiner_core.cards.facts import CardFacts
from refiner_core.cards.printed import Line, counted, number, quoted
from refiner_core.contract.certificates import Certificate


def public_certificate(
    certificates: list[Certificate], trained_on: Mapping[str, Any]
) -> dict[str, Any]:
    """The newest certificate of the kind of machine that a training ran on, without its name.

    Parameters
    ----------
    certificates
        Those of a workspace, oldest first.
    trained_on
        Provenance of the training stage: its ``host`` and ``versions``.

    Returns
    -------
    dict
        ``made_at`` (day), ``gpus`` (how many), ``gpu`` (name), ``passed``, ``failed``, ``absent``;
        empty where no certificate is of the same processor, GPUs and torch, or it did not pass.
    """
    host, torch = trained_on.get("host") or {}, (trained_on.get("versions") or {}).get("torch")
    same = [
        made
        for made in certificates
        if made.passed
        and made.host.get("cpu") == host.get("cpu")
        and list(made.host.get("gpus") or ()) == list(host.get("gpus") or ())
        and made.versions.get("torch") == torch
    ]
    if not same:
        return {}
    made = same[-1]
    return {
        "made_at": made.made_at[:10],
        "gpus": len(made.gpus),
        "gpu": made.gpus[0] if made.gpus else "",
        "passed": made.count("pass"),
        "failed": made.count("fail"),
        "absent": made.count("absent"),
    }


def hardware_notes(facts: CardFacts) -> list[Line]:
    """One note where such hardware was certified, none where not."""
    known = facts.certificate
    if not known:
        return []
    text = Line("The hardware that it was trained on was certified by `refiner certify` on ")
    text = text + quoted(str(known["made_at"]), "certificate.made_at")
    if known["gpus"]:
        text = text + " (" + number(known["gpus"], "certificate.gpus") + " x "
        text = text + quoted(str(known["gpu"]), "certificate.gpu") + ")"
    text = text + ": " + counted(known["passed"], "certificate.passed", "check") + " passed, "
    text = text + number(known["failed"], "certificate.failed") + " failed, and "
    return [text + number(known["absent"], "certificate.absent") + " could not be made there."]
