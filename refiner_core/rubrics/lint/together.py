"""What is wrong with rubrics that are judged together: those of a set, or of a row.

In: rubrics with their places. Out: (position, rule, what) triples.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from refiner_core.judges.lexical import INSTRUCTIONS, STOPWORDS, stem
from refiner_core.rubrics.row import Rubric

#: Two criteria look alike where one has no word of its own and this share of the other's. Where
#: both have one they are parallel: `strengths of X`, `weaknesses of X`.
ALIKE_SHARE = 0.7
#: Of criteria with fewer words than this, one word makes the difference.
ALIKE_WORDS = 5

_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")
#: Words that set criteria apart though they carry no content elsewhere.
_KEPT = {
    *("no", "nor", "not", "never", "neither", "without", "if", "only", "than"),
    *("first", "second", "third", "before", "after", "above", "below", "up", "down", "over"),
    *("under", "more", "most", "few", "same", "other", "all", "any", "each", "both"),
}
_PASSED_OVER = frozenset(
    stem(word)
    for word in (
        *(STOPWORDS - _KEPT),
        *INSTRUCTIONS,
        *("information", "type", "kind", "various", "different", "several", "important", "main"),
        *("key", "overview", "detail", "following", "include", "relevant", "background"),
    )
)


def together(rubrics: Sequence[tuple[str, Rubric]]) -> Iterator[tuple[int, str, str]]:
    """Problems of rubrics beside each other; places are such as ``rubrics[2]``."""
    yield from _same(rubrics, "title")
    yield from _same(rubrics, "description")
    yield from _alike(rubrics)
    weights = [rubric.signed_weight for _, rubric in rubrics]
    if weights and min(weights) < 0 and max(weights) <= 0:
        yield 0, "only-faults", "all rubrics with weight are negative"


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _same(rubrics: Sequence[tuple[str, Rubric]], part: str) -> Iterator[tuple[int, str, str]]:
    first: dict[str, int] = {}
    for position, (_, rubric) in enumerate(rubrics):
        if part == "title" and rubric.title == rubric.description[:60]:
            continue  # it has none of its own
        earlier = first.setdefault(_normal(getattr(rubric, part)), position)
        if earlier != position:
            yield position, f"duplicate-{part}", f"{rubrics[earlier][0]} has the same {part}"


def _alike(rubrics: Sequence[tuple[str, Rubric]]) -> Iterator[tuple[int, str, str]]:
    words = [_telling_words(rubric.description) for _, rubric in rubrics]
    texts = [_normal(rubric.description) for _, rubric in rubrics]
    for position, own in enumerate(words):
        for earlier in range(position):
            if texts[earlier] == texts[position]:
                continue  # an error already
            shared, both = len(own & words[earlier]), len(own | words[earlier])
            fewer = min(len(own), len(words[earlier]))
            if fewer < ALIKE_WORDS or shared < fewer or shared < ALIKE_SHARE * both:
                continue
            opposed = rubrics[position][1].polarity != rubrics[earlier][1].polarity
            against = ", with the other polarity" if opposed else ""
            yield (
                position,
                "near-duplicate",
                f"{shared} of {both} words are those of {rubrics[earlier][0]}{against}",
            )
            break


def _telling_words(text: str) -> frozenset[str]:
    """The stems of words that tell one criterion from another."""
    stems = frozenset(stem(word) for word in _WORD.findall(text.casefold()))
    return stems - _PASSED_OVER
