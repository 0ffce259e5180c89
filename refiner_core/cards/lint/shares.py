"""Percentages that cannot be, for the number of cases that they are of.

In: a card's :class:`Quantity` values. Out: findings. A share of n cases is k / n; where each case
is tried several times, as many times more. pass@k of S > k tries is 1 - C(S-c, k) / C(S, k) a case
(Chen et al. 2021, "Evaluating Large Language Models Trained on Code"), so that its denominators are
n · C(S, k); those of pass^k, which is C(c, k) / C(S, k), are the same. Where a card says that some
cases have fewer valid attempts, shares of any mixture may be. What a card does not say of tries is
not held against it: that is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import comb, lcm

from refiner_core.cards.lint.figures import (
    Figure,
    can_be_share,
    nearest_shares,
    parse_figure,
    scale,
)
from refiner_core.cards.lint.findings import Finding
from refiner_core.cards.lint.markdown import Document
from refiner_core.cards.lint.names import Metric, repeats_in, uneven_in
from refiner_core.cards.lint.quantities import Quantity

_FIX = (
    "say on how many cases, and with how many tries each, it was measured; or measure it again, as "
    "the others were"
)
_YES_NO = re.compile(r"(?i)pass\s?@|accura|success|solved|correct|exact match")
_OF_CASES = re.compile(
    r"(?<![\d.,])(?P<share>\d+(?:\.\d+)?\s?%)\W{0,4}"
    r"(?:\(?\s*[nN]\s*=\s*(?P<n>\d[\d,]*)\b(?!\.\d)"
    r"|of\s+(?:the\s+|all\s+)?(?P<cases>\d[\d,]*)\s+(?:[a-z-]+\s+){0,2}?"
    r"(?:tasks|questions|problems|prompts|examples|rows|cases|instances|items)\b)"
)


def impossible_shares(
    document: Document, known: Sequence[Quantity]
) -> Iterator[tuple[Finding, Quantity | None]]:
    """Findings, each with the number of a table that it is about."""
    repeats, uneven = repeats_in(document.text), uneven_in(document.text)
    highest = max((q.metric.drawn or 1 for q in known), default=1)
    for q in known:
        if q.n is None or not q.metric.yes_no or q.figure.hedged or not 0 < q.n <= 10**7:
            continue
        whole = scale(q.figure, fractions=q.fractions)
        if not 0 <= q.figure.value <= whole:
            continue
        stated = _denominators(q.metric, q.n, repeats)
        if stated is not None and uneven is not None:
            stated.append(q.n * _common(q.metric.drawn or 1, uneven))
        if can_be_share(q.figure, stated or _usual(q.metric, q.n, highest), whole):
            continue
        surely = stated is not None
        yield (
            Finding(
                q.line,
                "percentage-impossible",
                _message(q, whole, surely),
                _FIX,
                "error" if surely else "warning",
            ),
            q,
        )
    for finding in _in_prose(document, repeats):
        yield finding, None


def _denominators(metric: Metric, n: int, repeats: frozenset[int]) -> list[int] | None:
    """All that a share of ``n`` cases can be a fraction of; None where the card does not say how
    often each case was tried and that is usual for the metric."""
    k = metric.drawn
    if metric.once:
        return [n]
    if k is None:
        return [n, *(n * r for r in repeats)]
    if not repeats:
        return None
    if k == 1:
        return [n, *(n * r for r in repeats)]
    return [n, *(n * comb(r, k) for r in repeats if r > k)]


def _common(k: int, most: int) -> int:
    """What all shares of cases with 1 to ``most`` tries are fractions of, for ``k`` drawn."""
    return lcm(*(comb(tries, k) for tries in range(k, most + 1)))


def _usual(metric: Metric, n: int, highest: int) -> list[int]:
    """As nobody says how often each case was tried: pass@k of k tries, and pass@1 of the same;
    pass^k of as many as the largest k."""
    if metric.every is not None:
        return [n, n * comb(highest, metric.every)]
    return [n, n * highest] if metric.k == 1 else [n]


def _message(q: Quantity, whole: int, surely: bool) -> str:
    assert q.n is not None
    where = f" (line {q.n_line})" if q.n_line and q.n_line != q.line else ""
    text = f"{q.shown} is no share of n = {q.n}{where}: {nearest_shares(q.figure, q.n, whole)}"
    return text if surely else text + "; it does not say how often each was tried"


def _in_prose(document: Document, repeats: frozenset[int]) -> Iterator[Finding]:
    for paragraph in document.paragraphs:
        for found in _OF_CASES.finditer(paragraph.without_code):
            figure = parse_figure(found["share"])
            n = int((found["n"] or found["cases"]).replace(",", ""))
            if figure is None or not 0 < n <= 10**7 or figure.value > 100:
                continue
            if found["n"] and not _counts(paragraph.text):
                continue
            if not _possible(figure, n, repeats):
                yield Finding(
                    paragraph.line_of(found.start()),
                    "percentage-impossible",
                    f"{figure.text} is no share of n = {n}: {nearest_shares(figure, n, 100)}",
                    _FIX,
                )


def _possible(figure: Figure, n: int, repeats: frozenset[int]) -> bool:
    return can_be_share(figure, [n, *(n * r for r in repeats)], 100)


@lru_cache(maxsize=1)
def _counts(text: str) -> bool:
    """Whether a paragraph is about something that each case has or has not."""
    return _YES_NO.search(text) is not None
