"""Every end of an attempt has a class, and a line in the timeline of incidents."""

import errno
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from infra.jobs.failures import (
    CLASSES,
    classify,
    classify_silent_end,
    detailed,
    traceback_signature,
)
from infra.orchestrator.timeline import Incident, StageHistory, incidents_of
from infra.store import atomic as room
from infra.store.atomic import has_room, is_no_space
from refiner_core.contract.config import RetryConfig
from refiner_core.contract.errors import (
    EXIT_CODES,
    ConfigurationError,
    DataError,
    HealthStop,
    JudgeOutage,
    JudgeUnusable,
    KilledError,
    LaunchError,
    NoSpaceError,
    NotFiniteError,
    StageFailed,
    SystemOutage,
    UnsupportedError,
    WorkspaceError,
)
from refiner_core.contract.records import (
    Attempt,
    AttemptOutcome,
    FailureClass,
    StageRecord,
    StageResult,
    StageSpec,
)
from tests.bench.failures import scores


def test_every_class_has_a_rule_and_every_rule_a_documented_exit_code() -> None:
    assert set(CLASSES) == set(get_args(FailureClass))
    assert {rule.exit_code for rule in CLASSES.values()} <= set(EXIT_CODES)


def test_the_documented_table_is_the_table() -> None:
    text = (Path(__file__).resolve().parents[2] / "infra" / "README.md").read_text()
    retries = RetryConfig()
    for name, rule in CLASSES.items():
        if name == "none":
            continue
        budget = getattr(retries, name, retries.killed)
        shown = "no limit" if budget < 0 else str(budget)
        shown = shown if rule.decision == "resume" else "–"
        row = rf"\| `{name}` \| .+ \| {rule.remedy} \| {shown} \| {rule.exit_code} \|"
        assert re.search(row, text), row


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    ("error", "failure", "decision", "code"),
    [
        (KeyboardInterrupt(), "interrupted", "resume", 6),
        (NoSpaceError("x"), "disk_full", "resume", 5),
        (OSError(errno.EDQUOT, "x"), "disk_full", "resume", 5),
        (JudgeOutage("You exceeded your current quota"), "judge_outage", "resume", 7),
        (RuntimeError("API quota exceeded"), "bug", "resume", 70),
        (JudgeUnusable("x"), "judge_unusable", "resume", 7),
        (ConfigurationError("x"), "bad_configuration", "stop", 2),
        (DataError("x"), "bad_data", "stop", 3),
        (WorkspaceError("x"), "bug", "stop", 4),
        (PermissionError(errno.EACCES, "x", "/locked/pub"), "bug", "stop", 4),
        (UnsupportedError("x"), "unsupported", "stop", 8),
        (MemoryError(), "out_of_memory", "resume", 1),
        (RuntimeError("[enforce fail] can't allocate memory"), "out_of_memory", "resume", 1),
        (OutOfMemoryError("CUDA out of memory"), "gpu_out_of_memory", "resume", 1),
        (RuntimeError("CUDA error: an illegal memory access"), "gpu_error", "resume", 1),
        (RuntimeError("NCCL Error 2: unhandled system error"), "gpu_error", "resume", 1),
        (NotFiniteError("the loss is nan"), "not_finite", "stop", 1),
        (HealthStop("the entropy collapsed"), "unhealthy", "stop", 1),
        (LaunchError("sbatch: socket timed out"), "launch_failure", "resume", 1),
        (SystemOutage("no controller"), "system_outage", "resume", 7),
        (OSError(errno.EROFS, "Read-only file system"), "system_outage", "resume", 7),
        (KilledError("the trainer was killed"), "killed", "resume", 1),
        (StageFailed("nothing is left to train on"), "bug", "stop", 1),
        (ImportError("no module named x"), "bug", "stop", 70),
        (ValueError("x"), "bug", "resume", 70),
    ],
)
def test_errors_have_outcomes(error: BaseException, failure: str, decision: str, code: int) -> None:
    outcome = classify(error)
    assert (outcome.failure, outcome.decision, outcome.exit_code) == (failure, decision, code)


def test_a_full_disk_may_be_a_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = RuntimeError("saving failed")
    hidden.__cause__ = OSError(errno.EDQUOT, "Disk quota exceeded")
    outcome = detailed(classify(hidden), hidden, 100)
    assert (outcome.failure, outcome.errno, outcome.step) == ("disk_full", 122, 100)
    group = ExceptionGroup("several", [ValueError("x"), OSError(errno.EDQUOT, "y")])
    assert classify(group).failure == "disk_full"
    error = RuntimeError("PytorchStreamWriter failed writing file data/3")
    assert not is_no_space(error, tmp_path)
    assert has_room(tmp_path)
    assert list(tmp_path.iterdir()) == [], "a probe leaves nothing"
    monkeypatch.setattr(room, "has_room", lambda _: False)
    assert is_no_space(error, tmp_path)
    assert not is_no_space(ValueError("learning rate"), tmp_path)


IMPORT_ERROR = """Traceback (most recent call last):
  File "worker.py", line 1, in <module>
ModuleNotFoundError: No module named 'flows'

The above exception was the direct cause of the following exception:
subprocess.CalledProcessError: Command '['env']' returned non-zero exit status 1.
submitit.core.utils.FailedJobError: Traceback
"""


EXIT_1 = "subprocess.CalledProcessError: Command '['env']' returned non-zero exit status 1."


@pytest.mark.parametrize(
    ("started", "printed", "failure"),
    [
        (True, "", "killed"),
        (False, "", "killed"),
        (False, IMPORT_ERROR, "bug"),
        (True, "died with <Signals.SIGKILL: 9>.", "killed"),
        (True, "returned non-zero exit status 5.", "disk_full"),
        (True, "returned non-zero exit status 6.", "interrupted"),
        # Of all that ends with 7, this is what keeps a worker from leaving its word.
        (True, "returned non-zero exit status 7.", "system_outage"),
        (False, "OSError: [Errno 122] Disk quota exceeded", "disk_full"),
        (False, "OSError: [Errno 116] Stale file handle: '/w/x'\n" + EXIT_1, "system_outage"),
        (True, "SafetensorError: I/O error: Input/output error (os error 5)", "system_outage"),
    ],
)
def test_a_silent_job_is_judged_by_its_output(started: bool, printed: str, failure: str) -> None:
    outcome = classify_silent_end(started, printed)
    assert outcome.failure == failure
    if printed == IMPORT_ERROR:
        assert outcome.decision == "stop"
        assert "No module named 'flows'" in outcome.message


def raised(error: Exception, deeper: bool = False) -> Exception:
    def inner() -> None:
        raise error

    try:
        if deeper:
            raise error
        inner()
    except Exception as caught:
        return caught
    raise AssertionError


def test_a_bug_has_a_signature_and_is_not_retried_before_the_first_step() -> None:
    one, two = raised(ValueError("row 17")), raised(ValueError("row 18"))
    assert traceback_signature(one) == traceback_signature(two), "messages differ"
    assert traceback_signature(one) != traceback_signature(raised(KeyError("x")))
    assert traceback_signature(one) != traceback_signature(raised(ValueError("x"), deeper=True))
    assert detailed(classify(one), one, None).decision == "stop"
    assert detailed(classify(one), one, 7).decision == "resume"


def test_logs_show_their_class() -> None:
    """The public set: known logs whole, unseen ones mostly; a hint is no failure."""
    known, unseen = scores("logs"), scores("unseen")
    assert [k for k, s in known.items() if min(s.precision, s.recall) < 0.95] == []
    assert (unseen["all"].precision, unseen["all"].recall) >= (0.8, 0.7)


# ---------------------------------------------------------------- the timeline


SPEC = StageSpec(1, "grpo", "grpo", "f" * 64, "grpo", 1, {}, {}, {})
BEGAN = {
    "claimed_at": "2026-11-21T01:00:00.000+00:00",
    "started_at": "2026-11-21T01:01:00.000+00:00",
}
ENDED = {"ended_at": "2026-11-21T03:12:00.000+00:00", "seconds": 5000.0}
FIRST = Attempt(
    1, "refiner-grpo", "slurm", "login:1:1.00", **BEGAN, **ENDED, resumed_from_step=50, node="n3"
)
AGAIN = {
    "claimed_at": "2026-11-21T03:13:00.000+00:00",
    "started_at": "2026-11-21T03:16:00.000+00:00",
}
SECOND = replace(FIRST, number=2, **AGAIN, ended_at=None, resumed_from_step=99, seconds=None)
ANEW = replace(SECOND, resumed_from_step=None)
FULL = "No space left in /scratch/checkpoints while saving the checkpoint of step 100: 122"
QUOTA = AttemptOutcome("disk_full", "resume", FULL, 5, step=100, errno=122)


def ended(failure: FailureClass, step: int | None = None, message: str = "") -> Attempt:
    decision = "stop" if failure in ("bug", "cancelled") else "resume"
    return replace(FIRST, outcome=AttemptOutcome(failure, decision, message, step=step))


def timeline(
    *attempts: Attempt,
    events: tuple[dict[str, Any], ...] = (),
    beats: dict[int, dict[str, Any]] | None = None,
    result: StageResult | None = None,
    gpus: int = 8,
) -> list[Incident]:
    record = StageRecord(SPEC, attempts, result)
    history = StageHistory("grpo", "grpo-ffff", record, beats or {}, gpus)
    return incidents_of([history], events)


def test_a_requeue_is_counted_from_the_last_sign_of_life() -> None:
    """The restarted job records the end of its last start a moment before it continues."""
    first = replace(
        ended("preempted"), started_at="2026-11-21T03:00:00+00:00", seconds=720.0,
        ended_at="2026-11-21T03:15:59+00:00",
    )  # fmt: skip
    again = replace(SECOND, started_at="2026-11-21T03:16:00+00:00", restart=1)
    (found,) = timeline(first, again)
    assert "resumed from step 99 after 4 min" in found.text


def test_the_step_100_story_reads_as_one_line() -> None:
    events = (
        {"event": "claim", "stage": "grpo", "attempt": 1},
        {"event": "reclaimed", "stage_id": "grpo-ffff", "bytes": 56_000_000_000, "items": []},
        {"event": "claim", "stage": "grpo", "attempt": 2},
    )
    (found,) = timeline(replace(FIRST, outcome=QUOTA), SECOND, events=events)
    assert found.line == (
        "2026-11-21 03:12 grpo: EDQUOT (errno 122) while saving step 100 on n3; 52.2 GiB "
        "reclaimed; resumed from step 99 after 4 min; 13 GPU-minutes lost"
    )
    assert (found.lost_steps, found.lost_seconds) == (1, 5000 / 50 * 8)
    assert found.resolved


@pytest.mark.parametrize(
    ("attempt", "after", "steps", "seconds"),
    [
        (ended("preempted", 99), SECOND, 0, 0.0),  # its last step was saved
        (ended("killed", 100), SECOND, 1, 800.0),  # one of fifty steps, on eight GPUs
        (ended("killed", 100), ANEW, 100, 40000.0),  # all of it
        (ended("killed", 50), replace(SECOND, resumed_from_step=50), 0, 40000.0),  # not one step
        (ended("killed", 100), replace(ANEW, started_at=None), None, None),
        (replace(ended("killed", 100), seconds=None), SECOND, 1, None),
    ],
)
def test_costs_of_incidents(attempt, after, steps, seconds) -> None:
    (found,) = timeline(attempt, after)
    assert (found.lost_steps, found.lost_seconds) == (steps, seconds)


def test_the_last_heartbeat_gives_the_step() -> None:
    beats = {1: {"progress": {"done": 100}, "seconds": 5000.0, "saving": True}}
    (found,) = timeline(replace(ended("killed"), seconds=None), SECOND, beats=beats, gpus=0)
    assert "while saving after step 100" in found.text
    assert found.text.endswith("2 CPU-minutes lost")
    assert found.lost_steps == 1


def test_a_later_attempt_gives_the_resumed_step() -> None:
    """It once read "started over", though the attempt after it resumed from step 99."""
    at_once = replace(
        SECOND,
        resumed_from_step=None,
        ended_at=SECOND.started_at,
        outcome=replace(QUOTA, step=None),
    )
    third = replace(SECOND, number=3, started_at="2026-11-21T03:20:00.000+00:00")
    first = timeline(replace(FIRST, outcome=QUOTA), at_once, third)[0]
    assert "resumed from step 99 after 8 min" in first.text
    assert first.lost_steps == 1


def test_a_wait_for_space_belongs_to_the_attempt_before_it() -> None:
    events = (
        {"event": "claim", "stage": "grpo", "attempt": 1},
        {"event": "short", "stage_id": "grpo-ffff", "need_bytes": 10**9},
        {"event": "short", "stage_id": "another", "need_bytes": 10**9},
    )
    (found,) = timeline(replace(FIRST, outcome=QUOTA), events=events)
    assert "not resumed" in found.text
    events = (*events, {"event": "room", "stage_id": "grpo-ffff", "waited_s": 240.0})
    (found,) = timeline(replace(FIRST, outcome=QUOTA), SECOND, events=events)
    assert "; waited 4 min for space; resumed from step 99" in found.text


def test_a_stage_without_space_to_begin_is_an_incident() -> None:
    events = ({"at": "2026-11-21T03:12", "event": "short", "stage": "grpo", "need_bytes": 1 << 20},)
    (found,) = timeline(events=events)
    assert "1.0 MiB" in found.text
    assert (found.attempt, found.failure, found.resolved) == (0, "no_room", False)
