"""Phrases at the desk: of tasks, users and experts."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

DAYS: tuple[str, ...] = (
    "monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday",
)  # fmt: skip

CLARIFY = ("sorry, i do not understand.", "what do you mean?")
THANKS = ("thanks, that is all.", "great, thanks.")
OKAY = ("okay, thanks.", "okay, then that is all.")
LEAVE = "this takes too long, bye."
UNKNOWN = "i do not know."
ONE_STEP = "one step please."
YES = ("yes please.", "yes, do it.")
NO = ("no, leave it.", "no thanks.")
ANYWAY = ("please do it anyway.", "i need it anyway.")

#: Alternative openings of an expert's sentences.
_PARAPHRASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"^what is (your .*)\?$", (r"what is \1?", r"please tell me \1.")),
    (r"^your (\w+) is (.*)$", (r"your \1 is \2", r"the \1 is \2")),
    (r"^the (fee|refund) is (\d+)\. do you want it\?$",
     (r"the \1 is \2. do you want it?", r"the \1 is \2. is that okay?")),
)  # fmt: skip


def ask(slots: Sequence[str]) -> str:
    """A question for things that only the user knows."""
    return "what is your " + " and your ".join(slots) + "?"


def paraphrase(text: str, rng: random.Random) -> str:
    """An equivalent phrase in one of the expert's variants."""
    for pattern, ways in _PARAPHRASES:
        if re.match(pattern, text):
            return re.sub(pattern, rng.choice(ways), text)
    return text


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text in lower case; ids and numbers are words."""
    return tuple(re.findall(r"[a-z0-9_]+", text.lower()))


def contains(heard: Sequence[str], phrase: str) -> bool:
    """True if a phrase occurs in the words; ``a|b``: either phrase, ``!a``: its absence."""
    if phrase.startswith("!"):
        return not contains(heard, phrase[1:])
    return any(_stands_in(heard, words_of(one)) for one in phrase.split("|"))


def _stands_in(heard: Sequence[str], wanted: Sequence[str]) -> bool:
    n = len(wanted)
    return n > 0 and any(tuple(heard[i : i + n]) == tuple(wanted) for i in range(len(heard)))
