"""Numbers as they are printed: value, digits, unit, interval, n.

In: the text of a cell. Out: a :class:`Figure` or None. A printed number stands for all values that
round to it; whether two agree, and whether one can be a share of n, follows from that alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

_NUMBER = r"[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?"
_FIGURE = re.compile(
    rf"(?P<hedge>[~≈<>≤≥]\s*)?(?P<value>{_NUMBER})\s*(?P<unit>%)?"
    rf"(?:\s*(?:±|\+/-)\s*{_NUMBER}\s*%?)?"
    rf"(?:\s*[\[(](?P<low>{_NUMBER})\s*%?\s*(?:,|;|–|—|-|to|\.\.)\s*(?P<high>{_NUMBER})\s*%?[\])])?"
    r"(?:\s*,?\s*\(?[nN]\s*=\s*(?P<n>\d[\d,]*)\)?)?"
)
_N = re.compile(r"(?<![A-Za-z])[nN]\s*=\s*(\d[\d,]*)(?![\d.])")


@dataclass(frozen=True)
class Figure:
    """One printed number.

    Attributes
    ----------
    text
        As it was printed.
    value, decimals
        The number, and how many digits stand after the point.
    percent
        A % stood behind it.
    hedged
        It is said to be about, below or above that.
    low, high
        Its interval.
    n
        As printed beside it.
    """

    text: str
    value: Fraction
    decimals: int
    percent: bool = False
    hedged: bool = False
    low: Fraction | None = None
    high: Fraction | None = None
    n: int | None = None

    @property
    def unit(self) -> Fraction:
        """What one step of its last digit is worth."""
        return Fraction(10) ** -self.decimals

    @property
    def is_count(self) -> bool:
        """A whole number without a unit."""
        return self.decimals == 0 and not self.percent and not self.hedged and self.value >= 0


def parse_figure(text: str) -> Figure | None:
    """The number that a cell consists of, or None where it is anything else."""
    found = _FIGURE.fullmatch(text.strip())
    if found is None:
        return None
    number = parse_number(found["value"])
    if number is None:
        return None
    low = parse_number(found["low"] or "")
    high = parse_number(found["high"] or "")
    return Figure(
        text=text.strip(),
        value=number[0],
        decimals=number[1],
        percent=bool(found["unit"]),
        hedged=bool(found["hedge"]),
        low=low and low[0],
        high=high and high[0],
        n=int(found["n"].replace(",", "")) if found["n"] else None,
    )


def parse_number(text: str) -> tuple[Fraction, int] | None:
    """Value and number of decimals of a printed number, exactly."""
    plain = text.strip().replace(",", "").replace("−", "-")
    if not any(c.isdigit() for c in plain):
        return None
    mantissa, _, exponent = plain.lower().partition("e")
    if abs(int(exponent or 0)) > 300:
        return None
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return Fraction(plain), decimals


def stated_n(text: str) -> int | None:
    """The n in a heading, header or label such as ``GSM8K (n = 1,319)``; None where there is none
    or more than one."""
    found = {int(n.replace(",", "")) for n in _N.findall(text)}
    return found.pop() if len(found) == 1 else None


def agree(a: Figure, b: Figure) -> bool:
    """Whether two printed numbers can be one value; 0.59 and 59 % can."""
    slack = (a.unit + b.unit) / 2
    if abs(a.value - b.value) <= slack:
        return True
    for one, other in ((a, b), (b, a)):
        if abs(one.value) <= 1 < abs(other.value):
            return abs(one.value * 100 - other.value) <= (one.unit * 100 + other.unit) / 2
    return False


def scale(figure: Figure, *, fractions: bool) -> int:
    """What one whole is in a share: 100 for percentages, 1 where ``fractions`` are printed."""
    return 1 if fractions and not figure.percent else 100


def can_be_share(figure: Figure, denominators: Iterable[int], whole: int) -> bool:
    """Whether some k of one of ``denominators`` prints as the figure, rounded or cut off."""
    low = figure.value - figure.unit / 2
    high = figure.value + figure.unit
    for denominator in denominators:
        k = math.ceil(low * denominator / whole)
        if Fraction(k * whole, denominator) < high or k * whole == low * denominator:
            return True
    return False


def nearest_shares(figure: Figure, n: int, whole: int) -> str:
    """``14 of 100 are 14.0 %, 15 are 15.0 %``, for messages."""
    k = math.floor(figure.value * n / whole)
    sign = " %" if whole == 100 else ""
    below, above = (
        f"{float(Fraction(i * whole, n)):.{max(figure.decimals, 1)}f}" for i in (k, k + 1)
    )
    return f"{k} of {n} are {below}{sign}, {k + 1} are {above}{sign}"
