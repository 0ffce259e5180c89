"""Errors that a user can act on.

Every refusal has three parts: what happened, what was expected, and the field or command that fixes
it. Each class has an exit code of the `refiner` command (table: :data:`EXIT_CODES`), so that
scripts can tell a typing mistake from a full disk without parsing text.

Classes also derive from the matching builtin error, so library users can catch ``ValueError``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)

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


def in_rank(error: _Error, rank: int) -> _Error:
    """The same error, of any class, with the rank that it comes from as ``rank``."""
    vars(error)["rank"] = rank
    return error


class RefinerError(Exception):
    """Base of all errors that end in a one-paragraph message instead of a traceback."""

    exit_code: int = 1
    #: True if running the same command again resumes.
    resumable: bool = False
    #: The rank that it comes from, of several.
    rank: int | None = None

    def __init__(self, what: str, *, expected: str = "", fix: str = "") -> None:
        self.what, self.expected, self.fix = what, expected, fix
        super().__init__(self.paragraph())

    def of(self, part: str) -> RefinerError:
        """The same error, prefixed with the part it concerns."""
        self.what = f"{part}: {self.what}"
        self.args = (self.paragraph(),)
        return self

    def paragraph(self) -> str:
        """The message as a user reads it: what, expected, fix."""
        parts = [self.what.rstrip()]
        if self.expected:
            parts.append(f"Expected {self.expected.rstrip()}")
        if self.fix:
            parts.append(f"To fix it: {self.fix.rstrip()}")
        ended = [p if p.endswith((".", "!", "?")) else p + "." for p in parts]
        if parts[-1].endswith("`"):
            ended[-1] = parts[-1]  # a command at the very end is copied without a full stop
        return " ".join(ended)


class ConfigurationError(RefinerError, ValueError):
    """Invalid recipe, override or command line."""

    exit_code = 2


def no_such(
    what: str, word: str, known: Iterable[str], fix: str = "name one of these"
) -> ConfigurationError:
    """Error for an unknown name: ``There is no frame 'x'.``, with the known ones."""
    names = list(known)
    expected = f"one of: {', '.join(names) or '(there are none)'}"
    return ConfigurationError(f"{what} {word!r}.{suggest(word, names)}", expected=expected, fix=fix)


class DataError(RefinerError, ValueError):
    """Invalid input rows; names file and line."""

    exit_code = 3


class WorkspaceError(RefinerError, OSError):
    """Workspace that cannot be read, written or understood."""

    exit_code = 4


class DamagedCheckpoint(WorkspaceError):
    """Unreadable checkpoint. Nothing was changed, so the stage can resume from the one before."""


class NoSpaceError(RefinerError, OSError):
    """ENOSPC or EDQUOT: a state, not a bug. Always resumable."""

    exit_code = 5
    resumable = True


class StageFailed(RefinerError, RuntimeError):
    """Failure of a stage that another attempt would repeat."""


class ScriptFailed(StageFailed):
    """Failure of a user's script: a bug, but not one of refiner's.

    ``signature`` is the script's last error; it identifies a repeated failure.
    """

    signature = ""


class LaunchError(RefinerError, RuntimeError):
    """Job that the scheduler rejected or could not start. Retried after a pause."""

    resumable = True


class OutageError(RefinerError, RuntimeError):
    """External service that does not answer; the same command resumes once it does."""

    exit_code = 7
    resumable = True


class SystemOutage(OutageError):
    """Slurm or the file system does not answer; transient."""


class KilledError(RefinerError, RuntimeError):
    """Process that a stage needs was ended from outside; another attempt may succeed."""

    resumable = True


class HungError(RefinerError, RuntimeError):
    """Stage that stands still; the next attempt resumes from the last checkpoint."""

    resumable = True


class RanksDisagree(RefinerError, RuntimeError):
    """Collectives that differ between ranks: one has taken another branch."""

    resumable = True


class NodeLost(RefinerError, RuntimeError):
    """Node of the stage that does not answer any more, with its processes."""

    resumable = True


class NotFiniteError(StageFailed):
    """NaN or infinity where a number was expected; the weights were not touched with it."""


class HealthStop(StageFailed):
    """Stop by a health check whose policy is ``stop``; nothing was trained on what it found.

    The same recipe would stop again, so the stage is not retried automatically. The same command
    resumes from the last checkpoint once the cause, the check's limit or its policy has changed;
    of these only the policy ``skip`` makes another stage.
    """

    resumable = True


class MonitorPause(RefinerError, RuntimeError):
    """Pause by the monitor, for a person to look; the same command continues."""

    exit_code = 6
    resumable = True


class Interrupted(RefinerError, RuntimeError):
    """Stopped on request (Ctrl-C, SIGTERM, a time limit); work up to the last step is saved."""

    exit_code = 6
    resumable = True


class JudgeOutage(OutageError):
    """Outage of the judge: more judgements failed than the recipe allows, or no server answered
    for longer than ``judge.outage_patience_s``. Nothing was trained on them."""


class JudgeUnusable(JudgeOutage):
    """Judge whose replies are unusable too often: scores on another scale, no score, replies cut by
    length. A retry would give the same."""


class EnvironmentOutage(OutageError):
    """Outage of an environment or its user simulator: more episodes failed than the recipe allows.
    Nothing was trained on them."""


class HubOutage(OutageError):
    """Hub that is unreachable, fails, or asks to wait for longer than an attempt may."""


class HubRefused(RefinerError, RuntimeError):
    """Refusal by the Hub: token, permission, name, visibility, storage. A person has to fix it."""

    exit_code = 9
    resumable = True


class UnsupportedError(RefinerError, RuntimeError):
    """Valid recipe that this machine or version cannot run."""

    exit_code = 8
