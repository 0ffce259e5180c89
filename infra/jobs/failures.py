"""Failures: the reasons why attempts end, and their consequences.

In: the exception that ended a worker, or the traces of a process that ended without an outcome.
Out: an :class:`AttemptOutcome` of a failure class. One table (:data:`CLASSES`) has the remedy of
every class, and the exit code of `refiner` when no attempt is left. The number of retries is set in
the recipe (``dispatch.retries``).
"""

from __future__ import annotations

import errno
import hashlib
import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple

from infra.store.atomic import chain_of, is_no_space, says_no_space
from refiner_core.contract import errors
from refiner_core.contract.config import RetryConfig
from refiner_core.contract.records import Attempt, AttemptOutcome, Decision, FailureClass
from refiner_core.contract.types import ViewState

#: Messages in records are for tables; the whole traceback is in the log.
MESSAGE_LIMIT = 2000

Remedy = Literal[
    "nothing",  # it is over
    "resume",  # another attempt continues from the last checkpoint
    "resume elsewhere",  # the same, and the node is avoided
    "pause, then resume",  # the same, after a pause that doubles each time
    "free space, then resume",  # reclaim what the policy allows, wait for space, continue
    "stop",  # another attempt would only repeat it
]


class _ClassRule(NamedTuple):
    """Consequences of a failure class.

    ``exhausted`` is the stage's state when no attempt of this call is left: ``interrupted`` where
    something outside must change first and the same command then continues, ``failed`` where a
    person should look. ``words`` says for people what happened, where the name does not.
    """

    remedy: Remedy
    exit_code: int
    exhausted: ViewState
    words: str = ""

    @property
    def decision(self) -> Decision:
        """Decision recorded in the outcome of an attempt."""
        if self.remedy == "nothing":
            return "finish"
        return "stop" if self.remedy == "stop" else "resume"

    @property
    def avoids_node(self) -> bool:
        """Tell whether the stage's next jobs avoid the node."""
        return self.remedy == "resume elsewhere"


#: The signs of each class are in the table of `infra/README.md`.
CLASSES: dict[FailureClass, _ClassRule] = {
    "none": _ClassRule("nothing", 0, "failed", "finished"),
    "interrupted": _ClassRule("resume", 6, "interrupted", "stopped on request"),
    "cancelled": _ClassRule("stop", 6, "interrupted"),
    "preempted": _ClassRule("resume", 6, "interrupted"),
    "time_limit": _ClassRule("resume", 6, "interrupted", "time limit reached"),
    "node_failure": _ClassRule("resume elsewhere", 1, "failed", "node failed"),
    "launch_failure": _ClassRule("pause, then resume", 1, "failed", "could not be started"),
    "system_outage": _ClassRule(
        "pause, then resume", 7, "interrupted", "scheduler or file system did not answer"
    ),
    "killed": _ClassRule("resume", 1, "failed", "killed without a message"),
    "out_of_memory": _ClassRule("resume", 1, "failed", "host memory ran out"),
    "gpu_out_of_memory": _ClassRule("resume", 1, "failed", "GPU memory ran out"),
    "gpu_error": _ClassRule("resume elsewhere", 1, "failed", "GPU error"),
    "disk_full": _ClassRule("free space, then resume", 5, "interrupted", "disk full"),
    "hung": _ClassRule("resume", 1, "failed"),
    "judge_outage": _ClassRule("pause, then resume", 7, "interrupted", "judge did not answer"),
    "judge_unusable": _ClassRule("resume", 7, "failed", "judge gave no usable scores"),
    "environment_outage": _ClassRule(
        "pause, then resume", 7, "interrupted", "environment or user failed"
    ),
    "hub_outage": _ClassRule("pause, then resume", 7, "interrupted", "Hub did not answer"),
    "hub_refused": _ClassRule("stop", 9, "interrupted", "Hub refused"),
    "not_finite": _ClassRule("stop", 1, "failed", "loss, norm or reward was not finite"),
    "unhealthy": _ClassRule("stop", 1, "failed", "stopped by a health check"),
    "monitor_pause": _ClassRule("stop", 6, "interrupted", "paused by its monitor"),
    "bad_configuration": _ClassRule("stop", 2, "failed", "configuration refused"),
    "bad_data": _ClassRule("stop", 3, "failed", "data refused"),
    "unsupported": _ClassRule("stop", 8, "failed", "not supported here"),
    "bug": _ClassRule("resume", 70, "failed"),
}


def in_words(failure: str) -> str:
    """A failure class, or another cause, for people."""
    words: dict[str, str] = {name: rule.words for name, rule in CLASSES.items()}
    return words.get(failure) or failure.replace("_", " ")


_BY_TYPE: tuple[tuple[type[BaseException], FailureClass], ...] = (
    (errors.NoSpaceError, "disk_full"),
    (errors.Interrupted, "interrupted"),
    (errors.JudgeUnusable, "judge_unusable"),
    (errors.JudgeOutage, "judge_outage"),
    (errors.EnvironmentOutage, "environment_outage"),
    (errors.HubOutage, "hub_outage"),
    (errors.HubRefused, "hub_refused"),
    (errors.LaunchError, "launch_failure"),
    (errors.SystemOutage, "system_outage"),
    (errors.KilledError, "killed"),
    (errors.HungError, "hung"),
    (errors.NodeLost, "node_failure"),
    (errors.UnsupportedError, "unsupported"),
    (errors.ConfigurationError, "bad_configuration"),
    (errors.DataError, "bad_data"),
    (errors.NotFiniteError, "not_finite"),
    (errors.HealthStop, "unhealthy"),
    (errors.MonitorPause, "monitor_pause"),
    (KeyboardInterrupt, "interrupted"),
    (MemoryError, "out_of_memory"),
    (FloatingPointError, "not_finite"),
)
#: The first class of each exit code that is more specific than a failure.
_BY_EXIT_CODE = {r.exit_code: c for c, r in reversed(CLASSES.items()) if 1 < r.exit_code < 10}
_NOT_ALLOWED = (errno.EACCES, errno.EPERM)
#: After a failover, a file system is read-only or does not answer for a while.
_AWAY = (errno.EIO, errno.ESTALE, errno.EROFS, errno.EREMOTEIO)
#: Errors that another attempt can only repeat, whatever its progress.
_STATIC = (ImportError, SyntaxError, NameError)
#: Patterns in the order of the search, in lower case; measured by `python -m tests.bench failures`.
_BY_TEXT: tuple[tuple[FailureClass, tuple[str, ...]], ...] = (
    (
        "gpu_out_of_memory",
        (
            *(r"(cuda|hip)\W+(error: )?out of memory", "cuda failure 'out of memory'"),
            *("(cublas|cudnn)_status_alloc_failed", "no available memory for the cache blocks"),
            *("free memory on device .* is less than desired", "resource_exhausted: out of memory"),
        ),
    ),
    (
        "hung",
        (
            *("watchdog caught collective operation timeout", "watchdog got stuck for"),
            *(r"timed out waiting \d+ms for (recv|send)", "failed to pass monitoredbarrier"),
            r"timeouterror: rpc call to \w+ timed out",
        ),
    ),
    (
        "gpu_error",
        (
            *(r"(cuda|hip) (driver )?error\b(?! (check|handl|report))", "cudaerror"),
            *("cudnn_status", "cublas_status", r"nccl error\b(?! (check|handl|report))"),
            *("nccl(system|internal|remote)error", r"\bnccl watchdog\b(?! (is )?enabled)"),
            *("nccl communicator was aborted", "uncorrectable ecc", r"xid \("),
            *("no cuda gpus are available", "unable to determine the device handle"),
            *("failed to initialize nvml", "unexpected error from cuda", "triton error"),
            "nvidia-smi: no devices were found",
        ),
    ),
    (
        "system_outage",
        (
            *("input/output error", "stale file handle", "read-only file system"),
            *(r"\(os error (5|30|116)\)", "transport endpoint (is not connected|shutdown)"),
            *("unable to contact slurm controller", "slurm_receive_msg: socket timed out"),
        ),
    ),
    ("time_limit", (r"cancelled at \S+ due to time limit",)),
    ("preempted", (r"cancelled at \S+ due to (preemption|job requeue)",)),
    (
        "node_failure",
        (r"cancelled at \S+ due to node failure", r"(srun|salloc): error: node failure on"),
    ),
    (
        "launch_failure",
        (
            *("error: task launch for .* failed", "launch failed requeued held"),
            "application launch failed",
        ),
    ),
    (
        "out_of_memory",
        (
            *(r"out of (shared )?memory\b", "can(no|')t allocate memory", r"oom[-_ ]kill(ed)?\b"),
            *(r"(^|\n|\W)_?(array)?memoryerror(:|\s*$)", "std::bad_alloc"),
            "node running low on memory",
        ),
    ),
    (
        "not_finite",
        (
            *("floatingpointerror:", "cannot decrease scale anymore"),
            r"returned nan values in its \d+th output",
        ),
    ),
)
_SEARCHES = tuple((kind, re.compile("|".join(texts))) for kind, texts in _BY_TEXT)
#: Lines that report no failure of the program: by their level, or as hints and repeated attempts.
_ROUTINE = re.compile(r"[\W\d]*(\d\S* )*\W*\[?(info|debug|warning|hint)\b|(\S+ ){1,4}nccl info ")
_NO_ERRORS = re.compile(r"errors?( so far)?: 0\b")
#: Length of a line's beginning, and of the words before a sign, that are looked at.
_NEAR = 80
_HINT = re.compile(
    r"\b(if (you|there|it)|may|might|could|can|to avoid|unlikely|in case of|when|expected|handle)"
    r"\W[^:]{0,40}$"
)
_EXIT_STATUS = re.compile(r"returned non-zero exit status (\d+)")


def outcome_of(
    failure: FailureClass, message: str = "", exit_code: int | None = None
) -> AttemptOutcome:
    """The outcome of a class, with its decision and exit code from the table."""
    rule = CLASSES[failure]
    code = rule.exit_code if exit_code is None else exit_code
    return AttemptOutcome(failure, rule.decision, message[:MESSAGE_LIMIT], code)


def classify(error: BaseException, folder: Path | None = None) -> AttemptOutcome:
    """The outcome that an exception in a worker (or a launch) means.

    ``folder`` is where the attempt writes; it is probed if the exception reports only that a write
    failed. An exception that no rule matches is a bug: another attempt would only repeat it.
    """
    for kind, failure in _BY_TYPE:
        if isinstance(error, kind):
            return outcome_of(failure, _message(error))
    if isinstance(error, Exception) and is_no_space(error, folder):
        return outcome_of("disk_full", _message(error))
    if isinstance(error, OSError) and error.errno in _AWAY:
        return outcome_of("system_outage", _message(error))
    if isinstance(error, OSError) and error.errno in _NOT_ALLOWED:
        error = errors.WorkspaceError(
            f"The system refused: {error.strerror or error}: "
            f"{error.filename or '(no file named)'}.",
            expected="permission to read and write there",
            fix="correct the permissions, or name another place, and run the same command again",
        )
        return AttemptOutcome("bug", "stop", _message(error), errors.WorkspaceError.exit_code)
    # Errors that libraries report only in words: by the class's name, and by the message.
    named: FailureClass | None = (
        "gpu_out_of_memory" if type(error).__name__ == "OutOfMemoryError" else None
    )
    if spoken := named or class_of_text(str(error)):
        return outcome_of(spoken, _message(error))
    if isinstance(error, errors.ScriptFailed):
        return outcome_of("bug", _message(error), error.exit_code)
    if isinstance(error, errors.StageFailed | errors.WorkspaceError):
        return AttemptOutcome("bug", "stop", _message(error), error.exit_code)
    if isinstance(error, _STATIC):
        return replace(outcome_of("bug", _message(error)), decision="stop")
    return outcome_of("bug", _message(error))


def nodes_to_avoid(attempts: Iterable[Attempt]) -> tuple[str, ...]:
    """Nodes that failed in earlier attempts at a stage: an attempt's own, unless it is known that
    another node of its job was the cause."""
    ends = [(a, a.outcome) for a in attempts if a.outcome is not None]
    bad = [end.node or a.node for a, end in ends if CLASSES[end.failure].avoids_node]
    return tuple(dict.fromkeys(filter(None, bad)))


def is_outage(error: BaseException) -> bool:
    """Tell whether an error means only that something did not answer just now: it is retried, and
    nothing follows from it. A damaged file is no outage: it would be read the same again."""
    if isinstance(error, errors.SystemOutage | errors.NoSpaceError):
        return True
    return isinstance(error, OSError) and error.errno is not None


def class_of_text(text: str) -> FailureClass | None:
    """The class that an error message of any program indicates; None if it indicates none."""
    lines = [
        line
        for line in text.lower().splitlines()
        if not (_ROUTINE.match(line[:_NEAR]) or _NO_ERRORS.search(line))
    ]
    if any(says_no_space(line) for line in lines):
        return "disk_full"
    for kind, search in _SEARCHES:
        for line in lines:
            found = search.search(line)
            if found is not None and not _HINT.search(line[: found.start()][-_NEAR:]):
                return kind
    return None


def detailed(outcome: AttemptOutcome, error: BaseException, step: int | None) -> AttemptOutcome:
    """The outcome with the facts that identify the failure: step, traceback, errno, rank.

    A bug before the first step is quick to reproduce: it is not retried.
    """
    numbers = (getattr(e, "errno", None) for e in chain_of(error) if isinstance(e, OSError))
    found = next((n for n in numbers if n is not None), None)
    stop = outcome.failure == "bug" and not step
    return replace(
        outcome,
        step=step,
        signature=traceback_signature(error),
        errno=found,
        rank=getattr(error, "rank", None),
        decision="stop" if stop else outcome.decision,
    )


def traceback_signature(error: BaseException) -> str:
    """Identifies a traceback: the exception's type, and its functions and lines, independent of
    where the code is installed. An exception raised in another process brings its own."""
    if brought := getattr(error, "signature", ""):
        return str(brought)
    frames = [
        f"{Path(f.filename).name}:{f.name}:{f.lineno}"
        for f in traceback.extract_tb(error.__traceback__)
    ]
    return hashlib.sha256("\n".join([type(error).__name__, *frames]).encode()).hexdigest()[:16]


def without_progress(attempts: Sequence[Attempt], failure: FailureClass) -> int:
    """Number of newest attempts that ended in ``failure`` since the last one with progress.

    An attempt made progress if a later one resumed from a later checkpoint than the attempt itself
    did. One that died before it could resume is taken to have made none.
    """
    count, next_at = 0, 0
    for attempt in reversed(attempts):
        began_at = _began_at(attempt)
        if began_at is not None:
            if began_at < next_at:
                break
            next_at = began_at
        count += attempt.outcome is not None and attempt.outcome.failure == failure
    return count


def _began_at(attempt: Attempt) -> int | None:
    """The step that an attempt resumed from; 0 from the start, None if unknown."""
    if attempt.resumed_from_step is not None:
        return attempt.resumed_from_step
    known = attempt.outcome is not None and attempt.outcome.step is not None
    first = attempt.number == 1 and attempt.started_at is not None
    return 0 if known or first else None


def budget_left(attempts: Sequence[Attempt], retries: RetryConfig) -> bool:
    """Tell whether another attempt may follow ``attempts``, the last of which has ended
    resumably."""
    outcome = attempts[-1].outcome
    if outcome is None:
        return True
    known = outcome.failure == "bug" and bool(outcome.signature)
    earlier = (a.outcome for a in attempts[:-1] if a.outcome and a.outcome.failure == "bug")
    bug = (outcome.step, outcome.signature)
    if known and any((o.step, o.signature) == bug for o in earlier):
        return False
    # A stop that this call did not request counts as a kill.
    budget = getattr(retries, outcome.failure, retries.killed)
    if outcome.failure == "judge_unusable":  # progress up to then says nothing about the judge
        ended = (a.outcome is not None and a.outcome.failure for a in reversed(attempts))
        spent = len(list(takewhile(lambda failure: failure == outcome.failure, ended)))
    else:
        spent = without_progress(attempts, outcome.failure)
    return budget < 0 or spent <= budget


def classify_silent_end(
    started: bool, printed: str, exit_code: int | None = None
) -> AttemptOutcome:
    """The outcome of a job that is gone and has recorded none itself.

    ``started``: its worker took the attempt; ``printed``: the job's output before the worker
    opened its own log (an import error, for one); ``exit_code``: the worker's, if it is known from
    elsewhere than submitit's output.
    """
    codes = [exit_code] if exit_code else [int(code) for code in _EXIT_STATUS.findall(printed)]
    if codes and codes[-1] in _BY_EXIT_CODE:
        failure = _BY_EXIT_CODE[codes[-1]]
        return outcome_of(failure, f"the worker ended with exit code {codes[-1]}")
    if spoken := class_of_text(printed):
        return outcome_of(spoken, _last_line(printed))
    if codes and not started:
        why = f"the worker could not start: {_last_line(printed)}"
        return replace(outcome_of("bug", why), decision="stop")
    if started:
        return outcome_of("killed", "the worker ended without a message (killed, or a reboot)")
    return outcome_of("killed", "the job is gone and its worker never started")


def _message(error: BaseException) -> str:
    if isinstance(error, errors.RefinerError):
        return error.paragraph()
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _last_line(text: str) -> str:
    """The line that names the error: the last one that looks like ``SomeError: …``."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [
        line
        for line in lines
        if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)
        and "FailedJobError" not in line
        and "CalledProcessError" not in line
    ]
    return (named or lines or ["(it printed nothing)"])[-1]
