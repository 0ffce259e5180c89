"""Whether the judge has changed between two evaluations, by answers that cannot have changed.

In: scores of the random copier's answers, per arm, seed and prompt, beside those of the baseline.
Out: a :class:`Drift` per arm. The copier's answers are the same in every evaluation of a protocol:
where their scores differ, it is the judge, its server, or what scores answers that differs.

The rule, for a difference D of arm and baseline and a shift R of the reference, both paired over
seeds and prompts:

1. All references equal (to 1e-9): the judge has not moved. Nothing is changed.
2. R differs from 0 over prompts, all seeds together (p < 0.01) or one seed alone (p < 0.01 / number
   of seeds): the judge has moved. D is no progress, unless its whole interval, and that of D - R,
   lie on one side of 0 by more than three times the most that R can be (its interval over prompts,
   of all seeds or of the seed that moved): so much more would the judge have to have moved on the
   arm's answers than on the copier's.
3. Else the judge is noisy. D counts only if D - R is clear, too; what the noise of the judge alone
   may have made is not.

Seeds are fixed in the test of R: the question is whether *these* evaluations were judged alike.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from refiner_core.evaluation.statistics import Difference, two_way_means

Floats = npt.NDArray[np.float64]
SAME = 1e-9
LEVEL = 0.01
MARGIN = 3.0


class Drift(NamedTuple):
    """What the reference says of one arm against the baseline.

    Attributes
    ----------
    kind
        ``equal``; ``noise`` (differs, but not beyond chance); ``moved``; ``unknown`` (there is no
        reference).
    shift, low, high
        The reference's mean shift with its interval over prompts, of all seeds or of the seed that
        moved most clearly.
    changed, prompts
        How many of the reference's scores differ, of how many (all seeds).
    net
        The arm's difference less the reference's, prompt by prompt.
    """

    kind: Literal["equal", "noise", "moved", "unknown"]
    shift: float = 0.0
    low: float = 0.0
    high: float = 0.0
    changed: int = 0
    prompts: int = 0
    net: Difference | None = None

    def stands(self, found: Difference) -> bool:
        """Whether a difference that is clear by itself is one beside this drift."""
        if self.kind in ("equal", "unknown"):
            return True
        if self.net is None or self.net.low is None or self.net.high is None:
            return False
        margin = MARGIN * max(abs(self.low), abs(self.high)) if self.kind == "moved" else 0.0
        if found.low is None or found.high is None:
            return False
        above = min(found.low, self.net.low) > margin
        below = max(found.high, self.net.high) < -margin
        return above or below


UNKNOWN = Drift("unknown")


def drifts(reference: Floats, differences: Floats) -> list[Drift]:
    """One :class:`Drift` per arm.

    Parameters
    ----------
    reference
        Arm minus baseline of the copier's answers [arms, seeds, prompts]; NaN where either has no
        value.
    differences
        Arm minus baseline of the models' answers, of the same shape.
    """
    known = np.isfinite(reference)
    changed = (np.abs(np.where(known, reference, 0.0)) > SAME).sum(axis=(1, 2))
    return [
        _one(r, d, int(c), int(k.sum()))
        for r, d, c, k in zip(reference, differences, changed, known, strict=True)
    ]


def _one(reference: Floats, differences: Floats, changed: int, known: int) -> Drift:
    if not known:
        return UNKNOWN
    if not changed:
        return Drift("equal", prompts=known)
    seeds = len(reference)
    (together,) = two_way_means(reference.mean(axis=0)[None, None])
    alone = two_way_means(reference[:, None]) if seeds > 1 else []
    (net,) = two_way_means((differences - reference)[None])
    moved = [(f.p_value, f) for f in alone if f.p_value is not None and f.p_value < LEVEL / seeds]
    if together.p_value is not None and together.p_value < LEVEL:
        moved.append((together.p_value, together))
    if not moved:
        return _drift("noise", together, changed, known, net)
    largest = max((f for _, f in moved), key=lambda f: abs(f.value))
    return _drift("moved", largest, changed, known, net)


def _drift(
    kind: Literal["noise", "moved"], found: Difference, changed: int, known: int, net: Difference
) -> Drift:
    low = found.value if found.low is None else found.low
    high = found.value if found.high is None else found.high
    return Drift(kind, found.value, low, high, changed, known, net)
