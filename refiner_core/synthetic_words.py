"""The vocabulary of the synthetic data: all names, values and ids of generated rows.

In: nothing. Out: constant word lists, and random draws from them.

Everything is a pair: a name is a first and a second syllable (``Nab`` + ``suf``), a value
is two words (``velm rota``), a snippet id is two pieces (``S_`` + ``k3`` + ``F7``). Half of the
pairs are used, those whose places have an odd sum; the packaged base model was pre-trained on the
other half. So it knows all parts, but no whole.
"""

from __future__ import annotations

import random

_ONSETS = "bdfghjklmnprstvz"
_RIMES = ("ab", "el", "or", "um", "ig", "an", "et", "os", "ul", "im", "ar", "ek", "on", "ud", "il")
_ENDS = ("lm", "rn", "sk", "mp", "nt", "ft", "rk", "ld")
_VOWELS = "aeiou"
_PER_ONSET = 4


def _syllables(shift: int) -> tuple[str, ...]:
    """64 syllables consonant-vowel-consonant, four per onset."""
    return tuple(
        onset + _RIMES[(shift + 3 * i + 4 * j) % len(_RIMES)]
        for i, onset in enumerate(_ONSETS)
        for j in range(_PER_ONSET)
    )


def _heads() -> tuple[str, ...]:
    """64 first words of values, such as ``velm``."""
    return tuple(
        onset + _VOWELS[(i + j) % 5] + _ENDS[(i + 2 * j) % len(_ENDS)]
        for i, onset in enumerate(_ONSETS)
        for j in range(_PER_ONSET)
    )


def _tails() -> tuple[str, ...]:
    """64 second words of values, such as ``rota``."""
    return tuple(
        onset
        + _VOWELS[(i + 2 * j) % 5]
        + _ONSETS[(5 * i + 3 * j + 1) % 16]
        + _VOWELS[(i + j + 1) % 5]
        for i, onset in enumerate(_ONSETS)
        for j in range(_PER_ONSET)
    )


FIRST_SYLLABLES: tuple[str, ...] = tuple(s.capitalize() for s in _syllables(0))
SECOND_SYLLABLES: tuple[str, ...] = _syllables(7)
VALUE_HEADS: tuple[str, ...] = _heads()
VALUE_TAILS: tuple[str, ...] = _tails()
ID_HEADS: tuple[str, ...] = tuple(c + d for c in "acefhkmp" for d in "23456789")
ID_TAILS: tuple[str, ...] = tuple(c + d for c in "BDGJQTVX" for d in "23456789")
ATTRIBUTES: tuple[str, ...] = (
    "crop", "river", "guild", "festival", "metal", "bridge", "harbor", "stone",
    "tower", "market", "song", "coat", "fruit", "dance", "flag", "tree",
    "drum", "lamp", "ship", "bread", "bird", "wine", "cloth", "road",
)  # fmt: skip
SURVEY_WORDS: tuple[str, ...] = ("survey", "report", "letter")


def _draw(rng: random.Random, left: tuple[str, ...], right: tuple[str, ...], joint: str) -> str:
    i = rng.randrange(len(left))
    j = rng.randrange(len(right) // 2) * 2
    return left[i] + joint + right[j + 1 - i % 2]


def draw_name(rng: random.Random) -> str:
    """A name of two syllables, such as ``Nabsuf``."""
    return _draw(rng, FIRST_SYLLABLES, SECOND_SYLLABLES, "")


def draw_value(rng: random.Random) -> str:
    """A value of two words, such as ``velm rota``."""
    return _draw(rng, VALUE_HEADS, VALUE_TAILS, " ")


def draw_id(rng: random.Random) -> str:
    """A snippet id, such as ``S_k3F7``."""
    return "S_" + _draw(rng, ID_HEADS, ID_TAILS, "")


def similar_name(rng: random.Random, name: str) -> str:
    """Another name with the first syllable of ``name``."""
    first = name[:3]
    odd = SECOND_SYLLABLES[1 - FIRST_SYLLABLES.index(first) % 2 :: 2]
    return first + rng.choice([syllable for syllable in odd if syllable != name[3:]])
