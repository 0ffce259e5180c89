"""The terminal: text of trainers, judges and models reaches it without its control sequences.

In: a stream. Out: a stream that writes the same text, and on a terminal nothing that moves the
cursor, sets the title or the clipboard, or hides what stands there. What goes into a pipe or a file
is as it was. What redraws itself writes to :func:`raw` and gives its texts to :func:`printable`.
"""

from __future__ import annotations

import re
from typing import Any, TextIO

#: Whole sequences (CSI, OSC and other strings, two characters), then single characters: all
#: controls but line ends and tabs, and what turns the direction of text.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*+[ -/]*+[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*+(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*+[0-~]?"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """A text without control sequences; a progress bar's returns are ends of lines."""
    return _SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")


def printed_plainly(stream: TextIO) -> TextIO:
    """``stream`` where it is no terminal, and else one that writes to it what is printable."""
    if isinstance(stream, _Plain) or not stream.isatty():
        return stream
    return _Plain(stream)  # type: ignore[return-value]


def raw(stream: TextIO) -> TextIO:
    """The terminal itself."""
    return stream.terminal if isinstance(stream, _Plain) else stream


class _Plain:
    """All of a terminal's stream but that it passes on printable text alone."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal

    def write(self, text: str) -> int:
        """The number of characters that were given."""
        self.terminal.write(printable(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Each of them."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)
