"""The random copier: the baseline for every score of an answer.

In: a prompt and a random generator. Out: an answer of perfect form that cites random snippets and
copies their text. A model that scores no higher has learned the form only.
"""

from __future__ import annotations

import random
import re

from refiner_core.answers import parse_evidence

_MAX_WORDS = 40
#: Number of claims, with its frequency in synthetic demonstrations.
_CLAIM_COUNTS = {1: 0.51, 2: 0.45, 3: 0.04}


def random_baseline_answers(prompt_text: str, rng: random.Random) -> str:
    """Answer a prompt without reading it.

    Parameters
    ----------
    prompt_text
        Text with ``<snippet id=…>`` or ``<webpage id=…>`` evidence. An example of the notation
        in its instructions does not count, as for the rewards.
    rng
        Draws the number of claims and the snippets, each cut to :data:`_MAX_WORDS` words.

    Returns
    -------
    str
        One answer block; empty if the prompt has no evidence.
    """
    evidence = list(parse_evidence(prompt_text).texts.items())
    wanted = rng.choices(list(_CLAIM_COUNTS), weights=list(_CLAIM_COUNTS.values()))[0]
    drawn = rng.sample(evidence, min(wanted, len(evidence)))
    claims = []
    for cited, text in drawn:
        words = re.sub(r"<[^>]*>", " ", text).split()  # without tags
        claims.append(f"<snippet id={cited}>{' '.join(words[:_MAX_WORDS])}</snippet>")
    return f"<answer>{' '.join(claims)}</answer>"
