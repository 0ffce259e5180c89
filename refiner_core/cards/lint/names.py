"""What tables call things: metrics, counts, totals, the own model and the one before it.

In: labels of rows and columns. Out: what they mean, where that is beyond doubt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

#: Nobody tries a case more often; binomials of larger numbers fill a machine.
_MOST_TRIES = 10_000
#: Different numbers of tries that a card may tell of.
_MOST_REPEATS = 20
#: Numbers of agents beside pass@k: the first attempt alone, and all of k attempts.
_FIRST = re.compile(r"\bpass\s?@\s?1[_ ]first\b", re.IGNORECASE)
_HAT = re.compile(r"\bpass\s?\^\s?(\d+)(?![\w.])", re.IGNORECASE)
_PASS = re.compile(r"\bpass\s?@\s?(\d+)(?![\w.])", re.IGNORECASE)
#: Each case counts as 0 or 1, so that a mean of n is a whole number of n-ths.
_YES_NO = re.compile(
    r"\b(?:accuracy|acc|success rate|exact match|solve rate|resolve rate|resolved)\b",
    re.IGNORECASE,
)
#: A share of a whole, but not of cases.
_SHARE = re.compile(
    r"\b(?:f1|precision|recall|win rate|error rate|pass rate|percentage|proportion|share)\b",
    re.IGNORECASE,
)
_CHANGE = re.compile(
    r"Δ|\bdelta\b|\bgain|improve|\bdiff|change|speed|increase|\brelative\b|\bvs\b|[↑↓]\s*\d|overhead",
    re.IGNORECASE,
)
_CASES = re.compile(
    r"(?:#|no\.? of|num(?:ber)?(?: of)?|n|total)?\s*"
    r"(?:tasks?|questions?|problems?|prompts?|instances|cases|n|items)",
    re.IGNORECASE,
)
_SUM = re.compile(r"(?:grand )?total|sum", re.IGNORECASE)
_WHOLE = re.compile(r"(?:overall|total|all|combined|micro[- ]?(?:avg|average))", re.IGNORECASE)
_MEAN = re.compile(r"(?:macro[- ]?)?(?:average|avg\.?|mean)", re.IGNORECASE)
_OWN = re.compile(r"\bthis (?:model|work|checkpoint)\b|\bours?\b|\bour model\b", re.IGNORECASE)
_BASE = re.compile(
    r"\bbase(?:line)?\b|\bbefore (?:training|fine-?tuning)\b|\bvanilla\b|\bpre-?trained\b",
    re.IGNORECASE,
)
_REPEATS = re.compile(
    r"\b(?:num|n)_?samples\b`?\s*[=:]\s*`?(\d+)"
    r"|\b(?:avg|mean|average)\s?@\s?(\d+)"
    r"|\b(?:average[ds]?|mean)\s+(?:over|of|across)\s+(\d+)\s+"
    r"(?:independent |random |different )?"
    r"(?:runs|seeds|trials|samples|generations|attempts|rollouts)"
    r"|\b(\d+)\s+(?:samples|attempts|trials|rollouts|runs|generations|completions|responses)\s+"
    r"(?:per|for each|for every)\s+(?:task|prompt|question|problem|query)"
    r"|\b(\d+)\s+(?:runs|seeds|trials)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[a-z0-9+^@]+")

Role = Literal["own", "base", ""]


#: Attempts were lost, so that tasks have different numbers of them.
_UNEVEN = re.compile(r"fewer than (\d+) valid attempts", re.IGNORECASE)


@dataclass(frozen=True)
class Metric:
    """What a number measures. ``k`` is that of pass@k, ``every`` that of pass^k; ``yes_no`` says
    that each case counts as 0 or 1, ``once`` that it was tried once; ``share`` that more than 100 %
    cannot be."""

    key: str
    k: int | None = None
    yes_no: bool = False
    share: bool = False
    every: int | None = None
    once: bool = False

    @property
    def drawn(self) -> int | None:
        """How many attempts are drawn, for pass@k and pass^k."""
        return self.k or self.every


def metric_of(label: str) -> Metric | None:
    """The metric that a label names; None where it names none that is known, or a difference."""
    if _CHANGE.search(label):
        return None
    if _FIRST.search(label):
        return Metric("pass@1_first", yes_no=True, share=True, once=True)
    if found := _PASS.search(label):
        k = min(int(found[1]), _MOST_TRIES)
        return Metric(f"pass@{k}", k, yes_no=True, share=True)
    if found := _HAT.search(label):
        k = min(int(found[1]), _MOST_TRIES)
        return Metric(f"pass^{k}", yes_no=True, share=True, every=k)
    if yes_no := _YES_NO.search(label):
        key = yes_no.group().lower()
        return Metric("accuracy" if key == "acc" else key, yes_no=True, share=True)
    if share := _SHARE.search(label):
        return Metric(share.group().lower(), share=True)
    return None


def metrics_in(text: str) -> frozenset[str]:
    """Keys of all metrics that a sentence names."""
    patterns = (_FIRST, _PASS, _HAT, _YES_NO, _SHARE)
    found = [m.group() for p in patterns for m in p.finditer(text)]
    return frozenset(m.key for m in map(metric_of, found) if m is not None)


def without_metric(label: str) -> frozenset[str]:
    """The words of a label beside its metric: what sets it apart from others of its kind."""
    for pattern in (_FIRST, _PASS, _HAT, _YES_NO, _SHARE, _OWN):
        label = pattern.sub(" ", label)
    return words(label)


def words(text: str) -> frozenset[str]:
    """Lower-case words."""
    return frozenset(_WORD.findall(text.lower()))


def counts_cases(header: str) -> bool:
    """Whether a column says how many cases its rows have."""
    return _CASES.fullmatch(header.strip()) is not None


def total_kind(label: str) -> Literal["sum", "whole", "mean", ""]:
    """What the label of a row says of the rows beside it."""
    text = label.strip().strip(":").strip()
    if _SUM.fullmatch(text):
        return "sum"
    if _WHOLE.fullmatch(text):
        return "whole"
    return "mean" if _MEAN.fullmatch(text) else ""


def role_of(label: str) -> Role:
    """Whether a label is that of the card's own model, or of the one that it is compared with."""
    if _OWN.search(label):
        return "own"
    return "base" if _BASE.search(label) else ""


def names_change(label: str) -> bool:
    """Whether a label is that of a difference, which may be more than 100 % and below 0."""
    return _CHANGE.search(label) is not None


def uneven_in(text: str) -> int | None:
    """The largest number of attempts at a case, where a text says that some have fewer."""
    found = [int(m[1]) for m in _UNEVEN.finditer(text) if len(m[1]) < 6]
    return max(found) if found and max(found) <= 64 else None


def repeats_in(text: str) -> frozenset[int]:
    """How often each case was tried, as far as a text says so."""
    found = (next(filter(None, m.groups())) for m in _REPEATS.finditer(text))
    known = {int(n) for n in found if len(n) < 6 and 1 < int(n) <= _MOST_TRIES}
    return frozenset(sorted(known)[:_MOST_REPEATS])
