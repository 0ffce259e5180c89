"""All text at the desk: phrases, and the list of all their words.

In: nothing. Out: phrases for tasks, users and experts, and :data:`VOCABULARY`.

All texts of the desk (policies, tools, results, words of users and experts) consist of
:data:`WORDS` and :data:`PIECES`, names, ids and values from :mod:`refiner_core.synthetic_words`,
and two-digit numbers. So a tokenizer of whole words that knows these reads an episode in few
tokens; a test checks the texts against the lists.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

DAYS: tuple[str, ...] = (
    "monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday",
)  # fmt: skip

#: All words of all texts, in lower case.
WORDS: tuple[str, ...] = tuple(
    """
    a active after agent all allowed an and another anyway arguments arrived ask at before blocked
    blue booking bookings bye cable can cancel cancelled change changed code content dark day
    description desk device devices do does done end error exchange exchanged fee finish first
    fixed for free function get good great green hand help how i is it item know lamp leave like
    locked long look me mean much my name need new no none not object of offer okay on one only
    open or order orders over parameters please plug price problem properties reason red refund
    refunded replace replaced required reserve reserved respond restart room say send sent some
    sorry state step stock string taken takes tell terms thanks that the then there this to too
    tool touch turn type understand unlock up user want what where wireless with work wrong yes
    you your
    """.split()  # noqa: SIM905 (a list of these would be a page)
) + DAYS  # fmt: skip
#: Separators of words; runs that are frequent in JSON are one piece.
PIECES: tuple[str, ...] = (
    ".", ",", "?", ":", "{", "}", "[", "]", '"', "_",
    '{"', '"}', '": "', '", "', '": {"', '": ', ', "', '"}}', '"]}', '": ["', '"}}}', '"}}, "',
    "{}",
)  # fmt: skip
VOCABULARY: tuple[str, ...] = WORDS + PIECES

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
