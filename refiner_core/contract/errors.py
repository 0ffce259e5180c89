"""Errors that a user can act on.

Every refusal says three things: what happened, what was expected, and which field or command mends
it. Each class carries the exit code of the `refiner` command (table: :data:`EXIT_CODES`), so that
scripts can tell a typing mistake from a full disk without parsing text.

Classes are also the builtin error that they specialise, so library users can catch ``ValueError``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_CODES: dict[int, str] = {
    0: "everything that was asked for is done",
    1: "a stage failed; its log says why (`refiner logs STAGE`)",
    2: "bad command line, recipe, override or configuration value",
    3: "bad input data (file, line and reason are named)",
    4: "the workspace cannot be used (permissions, format, not a folder)",
    5: "no room left on the disk or quota; free some and run the same command again",
    6: "stopped on request; run the same command again to go on from the last checkpoint",
    7: "the judge, an environment's user, the Hub, W&B, Slurm or the file system did not answer "
    "often enough, or the judge not with judgements; resumable once it does",
    8: "this machine or this version lacks what the recipe asks for",
    9: "the Hub refuses (token, permission, name, storage); the same command tries again",
    70: "a bug in refiner itself (`--debug` shows the traceback)",
}


def suggest(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest known word, else nothing."""
    hits = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {hits[0]!r}?" if hits else ""


class RefinerError(Exception):
    """Base of all errors that end in a one-paragraph message instead of a traceback."""

    exit_code: int = 1
    #: True where running the same command again goes on from what is there.
    resumable: bool = False

    def __init__(self, what: str, *, expected: str = "", fix: str = "") -> None:
        self.what, self.expected, self.fix = what, expected, fix
        super().__init__(self.paragraph())

    def of(self, part: str) -> RefinerError:
        """The same error, saying of which part it is."""
        self.what = f"{part}: {self.what}"
        self.args = (self.paragraph(),)
        return self

    def paragraph(self) -> str:
        """The message as a user reads it: what, expected, fix."""
        parts = [self.what.rstrip()]
        if self.expected:
            parts.append(f"Expected {self.expected.rstrip()}")
        if self.fix:
            parts.append(f"To mend it: {self.fix.rstrip()}")
        ended = [p if p.endswith((".", "!", "?")) else p + "." for p in parts]
        if parts[-1].endswith("`"):
            ended[-1] = parts[-1]  # a command at the very end is copied without a full stop
        return " ".join(ended)


class ConfigurationError(RefinerError, ValueError):
    """A recipe, override or command line that cannot be meant."""

    exit_code = 2


def no_such(
    what: str, word: str, known: Iterable[str], fix: str = "name one of these"
) -> ConfigurationError:
    """Refusal of a name that is none of those that there are: ``There is no frame 'x'.``"""
    names = list(known)
    expected = f"one of: {', '.join(names) or '(there are none)'}"
    return ConfigurationError(f"{what} {word!r}.{suggest(word, names)}", expected=expected, fix=fix)


class DataError(RefinerError, ValueError):
    """Input rows that cannot be used; names file and line."""

    exit_code = 3


class WorkspaceError(RefinerError, OSError):
    """The workspace folder cannot be read, written or understood."""

    exit_code = 4


class DamagedCheckpoint(WorkspaceError):
    """A checkpoint's files cannot be read as what they should be. Nothing was changed by it, so
    that the one before it can be gone on from."""


class NoSpaceError(RefinerError, OSError):
    """ENOSPC or EDQUOT: a state of the world, not a bug. Always resumable."""

    exit_code = 5
    resumable = True


class StageFailed(RefinerError, RuntimeError):
    """A stage's attempt ended in a way that another try would not change."""


class ScriptFailed(StageFailed):
    """Somebody else's script has failed of itself: a bug as any other, but none of refiner's.

    ``signature`` is its own last error, by which it is known again.
    """

    signature = ""


class LaunchError(RefinerError, RuntimeError):
    """The scheduler did not take, or could not start, a job. Tried again after a pause."""

    resumable = True


class OutageError(RefinerError, RuntimeError):
    """Something outside does not answer; the same command goes on once it does."""

    exit_code = 7
    resumable = True


class SystemOutage(OutageError):
    """Slurm or the file system does not answer: a state of the world, that passes by itself."""


class KilledError(RefinerError, RuntimeError):
    """Something that a stage needs was ended from outside; another try may well get further."""

    resumable = True


class NotFiniteError(StageFailed):
    """NaN or infinity where a number was expected; the weights were not touched with it."""


class HealthStop(StageFailed):
    """A health check whose policy is ``stop`` found something; nothing was trained on it.

    The same recipe would find it again, so it is not tried again by itself. The same command goes
    on from the last checkpoint once the cause, the check's limit or its policy is another: none of
    these but ``skip`` makes it another stage.
    """

    resumable = True


class Interrupted(RefinerError, RuntimeError):
    """Stopped on request (Ctrl-C, SIGTERM, a time limit); work up to the last step is saved."""

    exit_code = 6
    resumable = True


class JudgeOutage(OutageError):
    """More judgements failed than the recipe allows, or no server answered for longer than
    ``judge.outage_patience_s``; nothing was trained on them."""


class JudgeUnusable(JudgeOutage):
    """The judge answers, and too many of its answers are no judgements: scores on another scale, no
    score at all, replies that end by length. Asked again it would say the same."""


class EnvironmentOutage(OutageError):
    """An environment or its user simulator failed in more episodes than the recipe allows;
    nothing was trained on them."""


class HubOutage(OutageError):
    """The Hub cannot be reached, fails, or asks to wait for longer than an attempt may."""


class HubRefused(RefinerError, RuntimeError):
    """The Hub says no: token, permission, name, visibility, storage. A person has to mend that."""

    exit_code = 9
    resumable = True


class UnsupportedError(RefinerError, RuntimeError):
    """The recipe is sound, but this machine or version cannot carry it out."""

    exit_code = 8
