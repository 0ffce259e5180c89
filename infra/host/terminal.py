"""The terminal: text of trainers, judges and models is printed without its control sequences.

In: a stream. Out: a stream that writes the same text, and on a terminal nothing that moves the
cursor, sets the title or the clipboard, or hides text. Output to a pipe or a file is unchanged.
Code that redraws writes to :func:`raw` and passes its texts through :func:`printable`.
"""

from __future__ import annotations

import re
from typing import Any, TextIO

#: Whole sequences (CSI, OSC and other strings, two characters), then single characters: all
#: controls except line ends and tabs, and characters that change the direction of text.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*+[ -/]*+[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*+(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*+[0-~]?"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """A text without control sequences; a progress bar's returns become line ends."""
    return _SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")


def printed_plainly(stream: TextIO) -> TextIO:
    """``stream`` if it is no terminal, else one that writes only printable text to it."""
    if isinstance(stream, _Plain) or not stream.isatty():
        return stream
    return _Plain(stream)  # type: ignore[return-value]


def raw(stream: TextIO) -> TextIO:
    """The terminal itself."""
    return stream.terminal if isinstance(stream, _Plain) else stream


class _Plain:
    """A terminal's stream that passes on only printable text."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal

    def write(self, text: str) -> int:
        """Write printable text; returns the number of given characters."""
        self.terminal.write(printable(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)
