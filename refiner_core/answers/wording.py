"""Texts as they are compared: two that say the same in the same words are one text.

In: any text. Out: its words, in lower case, without punctuation, kinds of quotes and of blanks,
invisible characters and forms of the same letter (NFKC). Signs that say something (``+``, ``<``,
``$``) and marks that belong to letters stay.
"""

from __future__ import annotations

import unicodedata


class _Compared(dict[int, str | int]):
    """By code point, what a character is in a comparison; found when it first occurs."""

    def __missing__(self, code: int) -> str | int:
        category = unicodedata.category(chr(code))
        found: str | int = code
        if category == "Cf":  # zero-width blanks, soft hyphens, marks of direction
            found = ""
        elif category[0] in "PZC" or category == "Sk":
            found = " "
        self[code] = found
        return found


_COMPARED = _Compared()


def compared(text: str) -> str:
    """Equal for texts that differ in case, punctuation, quotes or blanks alone.

    A text of nothing else is compared as it stands.
    """
    bare = unicodedata.normalize("NFKC", text.casefold()).translate(_COMPARED)
    return " ".join(bare.split()) or text.strip()
