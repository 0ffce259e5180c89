"""Each read of an attempt fails: no run ends for it, and nothing is recorded or lost.

A network file system fails to answer now and then (ESTALE, EIO, EACCES, EAGAIN), or denies for a
moment that a file is there (ENOENT). So each opening, read, listing, ``stat`` and process start in
the life of an attempt fails once, and the attempt has to end undisturbed. Where reads fail from
then on, it ends in a way that is resumed, and the next attempt ends undisturbed. `make prove` tries
all of them, a test run a third.
"""

from __future__ import annotations

import contextlib
import errno
import json
import random
import shutil
from pathlib import Path

import pytest

from infra.attempt.attempt import AttemptRun
from infra.jobs.failures import CLASSES
from infra.store.atomic import TEMPORARY
from infra.store.checkpoints import DAMAGED
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.errors import Interrupted, RefinerError
from refiner_core.contract.records import AttemptOutcome, StageResult
from tests.support.command import wait_until
from tests.support.fake_worker import work
from tests.support.faulty_disk import FaultyDisk
from tests.support.faulty_reads import FaultyReads, Lasting
from tests.support.one_life import PLAN, TOLD, Story, go_on, one_life, quick, story  # noqa: F401
from tests.support.plans import OWNER
from tests.support.thorough import share

pytestmark = pytest.mark.usefixtures("quick")
STAGE = PLAN.by_name["sft"]
#: Errors of a file system that does not answer; ENOENT is another one.
UNANSWERED = ("ESTALE", "EIO", "EACCES", "EAGAIN")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which the input is done, and an attempt has died after two checkpoints."""
    root = tmp_path_factory.mktemp("begun") / "ws"
    with FaultyDisk(root).mounted():
        assert one_life(root) == 0
        told = {**TOLD, "fail": "gpu_error", "fail_at_step": 3, "fails": 1}
        assert one_life(root, 0, STAGE, told) != 0
    return root


@pytest.fixture(scope="module")
def undisturbed(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Story, list[str]]:
    """What the second attempt leaves where every read is answered, and its reads."""
    code, reads = second_life(begun, tmp_path_factory.mktemp("sound"))
    assert code == 0
    return story(Path(reads.root) / "ws", STAGE), reads.operations


def second_life(
    begun: Path, folder: Path, at: int = 0, name: str = "ESTALE", lasting: Lasting = "once"
) -> tuple[int | None, FaultyReads]:
    """The exit code of a second attempt in which read ``at`` fails (None: it has none)."""
    shutil.copytree(begun, folder / "ws", dirs_exist_ok=True)
    reads, code = FaultyReads(folder, at, getattr(errno, name), lasting), None
    with FaultyDisk(folder).mounted(), reads.mounted(), contextlib.suppress(RefinerError, OSError):
        code = one_life(folder / "ws", 1, STAGE)
    return code, reads


def check_undisturbed(root: Path, expected: Story) -> None:
    """One more attempt, resumed from the newest checkpoint, and done."""
    assert story(root, STAGE) == expected
    record = Workspace.read_only(root).read_record(STAGE.id)
    assert [a.number for a in record.attempts] == [1, 2]
    assert record.attempts[-1].outcome == AttemptOutcome("none", "finish")
    assert record.attempts[-1].resumed_from_step == 2
    assert list(root.rglob(DAMAGED)) == []


def check_nothing_is_lost(root: Path, code: int | None) -> None:
    """Whole files, an end that is resumed, and every checkpoint that there was."""
    for path in root.rglob("*.json"):
        if TEMPORARY not in str(path.relative_to(root)):
            json.loads(path.read_text())
    assert list(root.rglob(DAMAGED)) == []
    record = Workspace.read_only(root).read_record(STAGE.id)
    last = record.attempts[-1]
    if record.result is not None:
        assert last.outcome == AttemptOutcome("none", "finish")
    elif last.number > 1 and last.outcome is not None:
        assert last.outcome.decision == "resume", last.outcome
        assert last.outcome.failure != "bug", last.outcome
        # None: what came after the outcome was recorded ended the process with an error.
        assert code in (None, CLASSES[last.outcome.failure].exit_code)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [True, False])
def test_every_read_of_an_attempt_may_fail_once(
    begun: Path, tmp_path: Path, undisturbed: tuple[Story, list[str]], missing: bool
) -> None:
    expected, operations = undisturbed
    assert len(operations) > 150
    wrong = []
    for at in share(len(operations), 3, int(missing)):
        name = "ENOENT" if missing else UNANSWERED[at % 4]
        folder = tmp_path / str(at)
        code, reads = second_life(begun, folder, at, name)
        try:
            assert code == 0
            check_undisturbed(folder / "ws", expected)
        except Exception as error:
            wrong.append(f"{name} at {at}, {reads.operations[at - 1]}: {error!r}"[:300])
        shutil.rmtree(folder)
    assert wrong == [], "\n".join(wrong)


@pytest.mark.slow
def test_reads_keep_failing(
    begun: Path, tmp_path: Path, undisturbed: tuple[Story, list[str]]
) -> None:
    expected, operations = undisturbed
    wrong = []
    for at in sorted(random.Random(17).sample(range(1, len(operations) + 1), 15)):
        folder = tmp_path / str(at)
        code, reads = second_life(begun, folder, at, "EIO", "from then on")
        try:
            check_nothing_is_lost(folder / "ws", code)
            go_on(folder / "ws", STAGE)
            assert story(folder / "ws", STAGE) == expected
        except Exception as error:
            wrong.append(f"after {at}, {reads.operations[at - 1]}: {error!r}"[:300])
        shutil.rmtree(folder)
    assert wrong == [], "\n".join(wrong)


def test_a_heartbeat_goes_on(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a heartbeat, a healthy training is killed as hung minutes later."""
    workspace, run = claimed(begun, tmp_path)
    monkeypatch.setattr("infra.attempt.stage_io.INTERVAL_S", 0.005)
    reads = FaultyReads(tmp_path, 1, errno.EIO, "from then on", thread="heartbeat")

    def beats() -> int:
        return int((workspace.read_heartbeat(STAGE.id, 2) or {"counter": 0})["counter"])

    with reads.mounted(), run:
        wait_until(lambda: len(reads.operations) > 40 and beats() > 3, "a heartbeat")
        workspace.request_stop_of(STAGE.id, 2, "interrupted", "a test")
        assert not run.stop_requested
        reads.fix()
        wait_until(lambda: run.stop_requested, "the request")
        run.fail(Interrupted("stopped"))


@pytest.mark.parametrize("says", ["it is there", "an error"])
@pytest.mark.parametrize("then", ["nothing can be read", "all is well"])
def test_an_error_after_the_result_does_not_fail_a_finished_stage(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, then: str
) -> None:
    """NFS may also report an error for a link that it has made."""
    workspace, run = claimed(begun, tmp_path)
    reads = FaultyReads(tmp_path, 0, errno.EIO, "from then on")
    publish = workspace.publish_result

    def published(stage_id: str, result: StageResult) -> bool:
        publish(stage_id, result)
        reads.at = len(reads.operations) if then == "nothing can be read" else 0
        if says == "an error":
            raise OSError(errno.EIO, "Input/output error")
        return True

    monkeypatch.setattr(workspace, "publish_result", published)
    with reads.mounted(), run:
        try:
            run.finish(work(run, TOLD))
        except OSError as error:
            run.fail(error)
    record = workspace.read_record(STAGE.id)
    assert record.state == "done"
    assert record.attempts[-1].outcome == AttemptOutcome("none", "finish")


def claimed(begun: Path, folder: Path) -> tuple[Workspace, AttemptRun]:
    """A second attempt that is about to start."""
    shutil.copytree(begun, folder / "ws")
    workspace = Workspace.open(folder / "ws")
    inputs = {role: PLAN.by_name[name].id for role, name in STAGE.inputs.items()}
    assert workspace.claim_attempt(STAGE, PLAN.config, inputs, StageClaim(OWNER, "local", 1))
    return workspace, AttemptRun(workspace, STAGE.id, 2, own_log=False)
