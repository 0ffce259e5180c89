"""Why an attempt ended, and what that leads to.

In: the exception that ended a worker, or what a process left behind that ended without a word. Out:
an :class:`Outcome` of a failure class. One table (:data:`CLASSES`) says for every class whether
another attempt goes on from the last checkpoint, and with which exit code `refiner` ends when no
attempt is left.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import NamedTuple

from infra.disk.room import is_no_space, says_no_space
from refiner_core.contract.errors import (
    ConfigurationError,
    DataError,
    Interrupted,
    JudgeOutage,
    NoSpaceError,
    RefinerError,
    StageFailed,
    UnsupportedError,
    WorkspaceError,
)
from refiner_core.contract.records import Decision, FailureClass, Outcome
from refiner_core.contract.views import ViewState

#: Messages in records are for tables; the whole traceback is in the log.
MESSAGE_LIMIT = 2000


class ClassRule(NamedTuple):
    """What a failure class leads to.

    ``exhausted`` is how the stage looks when no attempt of this call is left: ``interrupted`` where
    the world has to change first and the same command then goes on, ``failed`` where somebody
    should look.
    """

    decision: Decision
    exit_code: int
    exhausted: ViewState


CLASSES: dict[FailureClass, ClassRule] = {
    "none": ClassRule("finish", 0, "failed"),
    "interrupted": ClassRule("resume", 6, "interrupted"),
    "preempted": ClassRule("resume", 6, "interrupted"),
    "time_limit": ClassRule("resume", 6, "interrupted"),
    "node_failure": ClassRule("resume", 1, "failed"),
    "killed": ClassRule("resume", 1, "failed"),
    "out_of_memory": ClassRule("stop", 1, "failed"),
    "disk_full": ClassRule("resume", 5, "interrupted"),
    "hung": ClassRule("resume", 1, "failed"),
    "judge_outage": ClassRule("resume", 7, "interrupted"),
    "not_finite": ClassRule("stop", 1, "failed"),
    "bad_configuration": ClassRule("stop", 2, "failed"),
    "bad_data": ClassRule("stop", 3, "failed"),
    "unsupported": ClassRule("stop", 8, "failed"),
    "bug": ClassRule("stop", 70, "failed"),
}
_BY_TYPE: tuple[tuple[type[BaseException], FailureClass], ...] = (
    (NoSpaceError, "disk_full"),
    (Interrupted, "interrupted"),
    (JudgeOutage, "judge_outage"),
    (UnsupportedError, "unsupported"),
    (ConfigurationError, "bad_configuration"),
    (DataError, "bad_data"),
    (KeyboardInterrupt, "interrupted"),
    (MemoryError, "out_of_memory"),
    (FloatingPointError, "not_finite"),
)
_BY_EXIT_CODE: dict[int, FailureClass] = {
    2: "bad_configuration",
    3: "bad_data",
    5: "disk_full",
    6: "interrupted",
    7: "judge_outage",
    8: "unsupported",
}
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")
_EXIT_STATUS = re.compile(r"returned non-zero exit status (\d+)")


def outcome_of(failure: FailureClass, message: str = "", exit_code: int | None = None) -> Outcome:
    """The outcome of a class, with its decision and exit code from the table."""
    rule = CLASSES[failure]
    code = rule.exit_code if exit_code is None else exit_code
    return Outcome(failure, rule.decision, message[:MESSAGE_LIMIT], code)


def classify(error: BaseException, folder: Path | None = None) -> Outcome:
    """The outcome that an exception in a worker (or a launch) means.

    ``folder`` is where the attempt writes; it is probed when the exception only says that a write
    failed. An exception that no rule knows is a bug: another try would only repeat it.
    """
    for kind, failure in _BY_TYPE:
        if isinstance(error, kind):
            return outcome_of(failure, _message(error))
    if isinstance(error, Exception) and is_no_space(error, folder):
        return outcome_of("disk_full", _message(error))
    if isinstance(error, StageFailed | WorkspaceError):
        return Outcome("bug", "stop", _message(error), error.exit_code)
    if isinstance(error, OSError) and error.errno in _NOT_ALLOWED:
        return Outcome("bug", "stop", _message(_not_allowed(error)), WorkspaceError.exit_code)
    text = str(error).lower()
    if type(error).__name__ == "OutOfMemoryError" or any(t in text for t in _OUT_OF_MEMORY):
        return outcome_of("out_of_memory", _message(error))
    return outcome_of("bug", _message(error))


def _not_allowed(error: OSError) -> WorkspaceError:
    return WorkspaceError(
        f"The system refused: {error.strerror or error}: {error.filename or '(it names no file)'}.",
        expected="to be allowed to read and write there",
        fix="correct the permissions, or name another place, and run the same command again",
    )


def classify_silent_end(started: bool, printed: str) -> Outcome:
    """The outcome of a job that is gone and has written none itself.

    ``started`` says whether its worker ever took the attempt; ``printed`` is what the job printed
    before the worker opened its own log (an import error, for one).
    """
    codes = _EXIT_STATUS.findall(printed)
    if codes and int(codes[-1]) in _BY_EXIT_CODE:
        failure = _BY_EXIT_CODE[int(codes[-1])]
        return outcome_of(failure, f"the worker ended with exit code {codes[-1]}")
    if says_no_space(printed):
        return outcome_of("disk_full", _last_line(printed))
    if codes and not started:
        return outcome_of("bug", f"the worker could not start: {_last_line(printed)}")
    if started:
        return outcome_of("killed", "the worker is gone and left no word (killed, or a reboot)")
    return outcome_of("killed", "the job is gone and its worker never started")


def _message(error: BaseException) -> str:
    if isinstance(error, RefinerError):
        return error.paragraph()
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _last_line(text: str) -> str:
    """The line that names the error: the last one that looks like ``SomeError: …``."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)
        and "FailedJobError" not in line
        and "CalledProcessError" not in line
    ]
    return (errors or lines or ["(it printed nothing)"])[-1]
