"""Commands in code blocks: those of a shell parse, and those of refiner can be meant.

In: a :class:`Document`, and what knows refiner's commands (they are no part of this package). Out:
findings. Nothing is executed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence

from refiner_core.cards.lint.findings import Finding
from refiner_core.cards.lint.markdown import Document, Fence

#: Says what is wrong with the words of a command after ``refiner``; None where nothing is.
CommandCheck = Callable[[Sequence[str]], str | None]

_SHELLS = ("bash", "sh", "shell", "zsh")
_PROMPTED = ("console", "shell-session", "terminal", "shellsession", "bash-session")
#: What shlex does not know: text up to a mark of its own, and what is expanded.
_BEYOND = re.compile(r"<<-?\s*['\"]?\w|\$\(|`|\$'|\$\{[^}]{0,200}['\"#]")
_MORE = "\\"
#: Lines of a block, and commands of a card, that are looked at.
_MOST_LINES, _MOST_COMMANDS = 300, 100
_FIX = "correct the command, and run it once as it stands there"


def command_findings(document: Document, check: CommandCheck | None) -> Iterator[Finding]:
    """All findings of all shell blocks; a block without a language counts where each line of it is
    a command of refiner."""
    left = _MOST_COMMANDS
    for fence in document.fences:
        lines = _commands(fence)
        if (
            fence.language in _SHELLS
            and fence.closed
            and not _BEYOND.search("\n".join(fence.lines))
        ):
            yield from _quotes(fence, lines)
        for number, line in lines:
            words = _words(line)
            if words[:1] == ["refiner"] and check is not None and left:
                left -= 1
                problem = check(words[1:])
                if problem:
                    yield Finding(number, "command", f"`{_short(line)}`: {problem}", _FIX)


def _commands(fence: Fence) -> list[tuple[int, str]]:
    """Command lines with their numbers, those that go on joined."""
    shell, prompted = fence.language in _SHELLS, fence.language in _PROMPTED
    bare = not fence.language and any(line.startswith("refiner ") for line in fence.lines)
    if not (shell or prompted or bare):
        return []
    found: list[tuple[int, str]] = []
    going_on = False
    for number, raw in enumerate(fence.lines[:_MOST_LINES], start=fence.line + 1):
        line = raw.strip()
        if going_on:
            first, text = found[-1]
            found[-1] = (first, f"{text} {line.removesuffix(_MORE)}")
        elif prompted and not line.startswith("$ "):
            continue
        elif line and not line.startswith("#") and (not bare or line.startswith("refiner ")):
            found.append((number, line.removeprefix("$ ").removesuffix(_MORE)))
        else:
            continue
        going_on = line.endswith(_MORE)
    return found


def _quotes(fence: Fence, lines: Sequence[tuple[int, str]]) -> Iterator[Finding]:
    """A quote that is never closed; one that is closed some lines later is."""
    problem = _problem("\n".join(line for _, line in lines))
    if problem is None:
        return
    for position, (number, _) in enumerate(lines):
        rest = "\n".join(text for _, text in lines[position + 1 :])
        if _problem(rest) is None:
            yield Finding(number, "command", f"`{_short(lines[position][1])}`: {problem}", _FIX)
            return


def _problem(text: str) -> str | None:
    try:
        shlex.split(text, comments=True)
    except ValueError as error:
        return f"a shell cannot read it ({str(error).lower()})"
    return None


def _words(line: str) -> list[str]:
    """The words of a command, without variables that are set in front of it; empty where it does
    not parse."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return []
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        words = words[1:]
    return words


def _short(line: str) -> str:
    return line if len(line) <= 60 else line[:57] + "…"
