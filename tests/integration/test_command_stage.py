"""Stage `command`: another trainer is interrupted in many ways, and ends with the same bytes.

The trainer (tests/support/external_trainer.py) knows nothing of refiner and saves straight into
place. The bytes of its last checkpoint are compared with those of an undisturbed run.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.external.checkpoints import work_folder
from infra.host.processes import ProcessId
from infra.store.traces import read_metrics
from infra.store.workspace import Workspace
from refiner_core.contract.config import CommandConfig, DiskConfig
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.records import Attempt, AttemptOutcome, StageRecord
from tests.support.command import Stage, environment, refiner, start, wait_until
from tests.support.plans import SOURCES, claim, small_config
from tests.support.quota import fill, quota_folder

TRAINER = Path(__file__).parents[1] / "support" / "external_trainer.py"
RUN = f"{sys.executable} {TRAINER} --out {{output}} --seed {{seed}} --steps 16 {{resume}}"
COMMAND = CommandConfig(
    run=RUN,
    resume_arguments="--resume_from {checkpoint}",
    checkpoints="ckpt_*",
    complete="file:trainer.json",
    progress_pattern=r"step (?P<step>\d+)/(?P<total>\d+) loss (?P<loss>\S+)",
)


class Story:
    """One `command` stage, attempt after attempt, in workers of its own."""

    def __init__(self, root: Path, more: str = "", **command: Any) -> None:
        self.workspace = Workspace.open(root)
        fields = {"run": RUN + more, **command}
        config = replace(
            small_config("command"),
            command=replace(COMMAND, **fields),
            disk=DiskConfig(watch_s=0.2, reclaim=False),
        )
        self.plan: Plan = make_plan(config, SOURCES)
        self.id = self.plan.by_name["command"].id
        self.stage = self.workspace.layout.stage(self.id)
        self.work = work_folder(self.stage)
        self.count = 0

    def begin(self) -> subprocess.Popen[bytes]:
        """Start the next attempt's worker."""
        claim(self.workspace, self.plan, "command", after=self.count)
        self.count += 1
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "flows.worker", "--workspace", str(self.workspace.root)),
                *(self.id, str(self.count)),
            ],
            env=environment(),
            start_new_session=True,
        )

    def attempt(self) -> AttemptOutcome:
        """Run the next attempt to its end."""
        self.begin().wait(400)
        return self.outcome

    @property
    def last(self) -> Attempt:
        return self.workspace.read_attempt(self.id, self.count)

    @property
    def record(self) -> StageRecord:
        return self.workspace.read_record(self.id)

    @property
    def outcome(self) -> AttemptOutcome:
        assert self.last.outcome is not None, self.log
        return self.last.outcome

    @property
    def log(self) -> str:
        return self.stage.attempt(self.count).log.read_text()

    @property
    def steps(self) -> list[int]:
        return [m.step for m in read_metrics(self.stage.attempt(self.count).metrics)]

    def weights(self) -> str:
        folder = self.workspace.output_dir(self.id)
        assert folder is not None, self.log
        return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()

    def processes(self) -> list[psutil.Process]:
        """What of the trainer runs."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("REFINER_OUTPUT") == str(self.work):
                    found.append(process)
            except psutil.Error:
                continue
        return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """An undisturbed run, in whose folder an earlier trainer has left a process."""
    story = Story(tmp_path_factory.mktemp("undisturbed") / "a folder; with 'signs'")
    settings = {**os.environ, "REFINER_OUTPUT": str(story.work)}
    stale = subprocess.Popen(["sleep", "600"], env=settings, start_new_session=True)
    assert story.attempt().failure == "none", story.log
    assert stale.wait(60) == -signal.SIGKILL
    return story


@pytest.fixture(scope="module")
def undisturbed(whole: Story) -> str:
    return whole.weights()


def until(condition: Callable[[], Any], what: str) -> Any:
    return wait_until(condition, what)


def has_reached(story: Story, step: int) -> Callable[[], bool]:
    return lambda: bool(story.steps) and story.steps[-1] >= step


# ---------------------------------------------------------------- it ends, and how


def test_a_trainer_that_ends_well_leaves_a_model_and_its_numbers(whole: Story) -> None:
    result = whole.workspace.read_result(whole.id)
    assert (result.report["steps"], result.report["export"]) == (16, "ckpt_16")
    assert result.report["final"].keys() == {"loss"}
    assert [f.path for f in result.files] == ["model/model.safetensors", "model/trainer.json"]
    beat = whole.workspace.read_heartbeat(whole.id, 1)
    assert (beat["progress"]["done"], beat["progress"]["total"]) == (16, 16)
    assert whole.steps == list(range(1, 17))
    assert "step 16/16" in whole.log


def test_an_early_exit_with_0_restarts_the_trainer_once(tmp_path: Path, undisturbed: str) -> None:
    """Otherwise half a training would be published as a whole one."""
    once = Story(tmp_path / "once", " --leave_at 7")
    assert once.attempt().failure == "none", once.log
    assert "step 6 of 16" in once.log
    assert once.weights() == undisturbed
    assert once.steps == list(range(1, 17))
    always = Story(tmp_path / "always", " --leave_at 7 --always")
    assert always.attempt().failure == "none", always.log
    result = always.workspace.read_result(always.id)
    assert (result.report["steps"], result.report["steps_planned"]) == (4, 16)
    assert "step 6 of 16" in result.report["remark"]


def test_a_checkpoint_that_cannot_be_resumed_from_stays(tmp_path: Path) -> None:
    story = Story(tmp_path / "ws", " --step_s 0.1")
    worker = story.begin()
    until((story.work / "ckpt_8" / "trainer.json").exists, "two saves")
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    until(lambda: not story.processes(), "the trainer to be gone")
    before = sorted(p.name for p in story.work.iterdir())
    resume_arguments = "--resume_from {checkpoint} --nosuch"
    story.plan = make_plan(
        replace(
            story.plan.config,
            command=replace(story.plan.config.command, resume_arguments=resume_arguments),
        ),
        SOURCES,
    )
    assert story.attempt().failure == "bug", story.log
    assert any(name in story.log for name in before)
    assert sorted(p.name for p in story.work.iterdir()) == before


# ---------------------------------------------------------------- it is interrupted


def test_kill_9_of_the_worker_ends_all_and_resumes(tmp_path: Path, undisturbed: str) -> None:
    story = Story(tmp_path / "ws", " --step_s 0.1 --child")
    worker = story.begin()
    until(has_reached(story, 6), "step 6")
    assert len(story.processes()) >= 3  # the watchdog, the trainer and its background process
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    until(lambda: not story.processes(), "the trainer to be gone")
    assert story.attempt().failure == "none", story.log
    assert story.last.resumed_from_step in (4, 8)
    assert story.steps == list(range(1, 17))
    assert story.weights() == undisturbed
    until(lambda: not story.processes(), "the background process to be gone")


def test_sigterm_is_passed_on_and_the_trainer_saves(tmp_path: Path, undisturbed: str) -> None:
    story = Story(tmp_path / "ws", " --step_s 0.1 --save_every 100")
    worker = story.begin()
    until(has_reached(story, 3), "step 3")
    worker.send_signal(signal.SIGTERM)
    worker.wait(400)
    assert story.outcome.failure == "interrupted", story.outcome
    assert story.attempt().failure == "none", story.log
    assert (story.last.resumed_from_step or 0) >= 3
    assert story.weights() == undisturbed


def test_a_trainer_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    story = Story(tmp_path / "ws", " --step_s 0.1 --deaf --steps 1000")
    dispatch = replace(story.plan.config.dispatch, grace_s=1.0)
    story.plan = make_plan(replace(story.plan.config, dispatch=dispatch), SOURCES)
    worker = story.begin()
    until(has_reached(story, 3), "step 3")
    worker.send_signal(signal.SIGTERM)
    began = time.monotonic()
    worker.wait(400)
    assert time.monotonic() - began < 60, "the grace is 1 s"
    assert story.outcome.failure == "interrupted"
    assert not story.processes()
    worker = story.begin()
    until(has_reached(story, 3), "step 3 of the second attempt")
    claim(story.workspace, story.plan, "command", after=2)  # the attempt is given up
    worker.wait(400)
    assert not story.processes()
    assert story.last.outcome is None, "it is closed by the call that has claimed the next one"


def test_a_silent_trainer_makes_no_progress(tmp_path: Path) -> None:
    stories = [
        Story(tmp_path / heartbeat, " --hang_at 6", heartbeat=heartbeat)
        for heartbeat in ("output", "files")
    ]
    workers = [story.begin() for story in stories]

    def beats(field: str) -> list[int]:
        found = [s.workspace.read_heartbeat(s.id, 1) or {} for s in stories]
        return [int(beat.get(field, 0)) for beat in found]

    try:
        for story in stories:
            until(has_reached(story, 5), "step 5")
        time.sleep(4.5)
        told, counters = beats("told"), beats("counter")
        time.sleep(4.5)
        assert beats("told") == told
        assert all(told)
        assert all(b > a for a, b in zip(counters, beats("counter"), strict=True))
    finally:
        for worker in workers:
            ProcessId.of(worker.pid).kill_group()
            worker.wait()
    until(lambda: not any(s.processes() for s in stories), "the trainers to be gone")


# ---------------------------------------------------------------- no room


@pytest.mark.quota
def test_edquot_during_a_save_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    control = Story(tmp_path / "control", " --kib 2048")
    assert control.attempt().failure == "none"
    with quota_folder(tmp_path / "disk", 24) as disk:
        story = Story(disk.folder / "ws", " --kib 2048 --step_s 0.3 --write_s 0.05")
        filler = disk.folder / "filler"
        worker = story.begin()
        until((story.work / "ckpt_4" / "trainer.json").exists, "the first save")
        fill(filler, leave=1 << 20)
        worker.wait(400)  # its log may meet the full disk first, and wait `disk.hold_s` for room
        assert story.outcome.failure == "disk_full", story.outcome
        assert "Errno 122" in story.outcome.message
        assert "Errno 122] Disk quota exceeded" in story.log
        kept = {p.name for p in story.work.iterdir()}
        assert "ckpt_4" in kept
        assert all((story.work / name / "trainer.json").stat().st_size for name in kept), kept
        filler.unlink()
        os.sync()
        assert story.attempt().failure == "none", story.log
        assert (story.last.resumed_from_step or 0) >= 4
        assert story.steps == list(range(1, 17))
        assert story.weights() == control.weights()


# ---------------------------------------------------------------- through the command


LIKE = Path(__file__).parents[2] / "refiner_core" / "models" / "tiny" / "model.safetensors"
RECIPE = f"""
include: [own-trainer]
tracking: {{wandb: disabled}}
dispatch: {{poll_s: 0.1}}
disk: {{watch_s: 0.5}}
command:
  run: >-
    {sys.executable} {TRAINER} --out {{output}} --steps 12 --like {LIKE} --step_s 0.3
    --write_s 0.02 {{resume}}
  resume_arguments: --resume_from {{checkpoint}}
  checkpoints: ckpt_*
  complete: file:trainer.json
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "theirs.yaml"
    path.write_text(RECIPE)
    return str(path)


def published_sha256(report: dict[str, Any]) -> str:
    target = next(s["target"] for s in report["stages"] if s["name"] == "publish")
    return hashlib.sha256((Path(target) / "model.safetensors").read_bytes()).hexdigest()


def test_ctrl_c_and_a_killed_worker_are_resumed_to_the_end(recipe: str, tmp_path: Path) -> None:
    words = ("run", recipe, f"workspace={tmp_path / 'ws'}", "--no-server", "--json")
    stage = Stage(tmp_path / "ws", "command")
    process = start(*words)
    until(lambda: stage.folder and list(stage.folder.glob("work/ckpt_4")), "a save")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 6, err

    process = start(*words)
    until(lambda: len(stage.attempts) == 2 and stage.worker, "the second attempt")
    stage.kill()
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert {s["name"]: s["state"] for s in report["stages"]} == {
        "command": "done",
        "publish": "done",
    }
    assert len(stage.attempts) == 3
    resumed = json.loads((stage.attempts[-1] / "started.json").read_text())["resumed"]
    assert resumed["step"] >= 4
    assert published_sha256(report) == hashlib.sha256(LIKE.read_bytes()).hexdigest()


# ---------------------------------------------------------------- Hugging Face's own Trainer

HF_TRAINER = TRAINER.with_name("hf_trainer.py")
HF_RECIPE = f"""
include: [own-trainer]
stages: [command]
tracking: {{wandb: disabled}}
dispatch: {{poll_s: 0.1, backoff_s: 0.2}}
disk: {{watch_s: 1.0, hold_s: 2}}
command:
  run: >-
    {sys.executable} {HF_TRAINER} --output_dir {{output}} --seed {{seed}} {{resume}}
  env: [OMP_NUM_THREADS=1]
  companions: ""
"""


@pytest.fixture(scope="module")
def hf_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the weights after sixty undisturbed steps."""
    out = tmp_path_factory.mktemp("hf") / "undisturbed"
    words = [sys.executable, str(HF_TRAINER), "--output_dir", str(out), "--save_steps", "60"]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*words, "--seed", "42"], check=True, env=settings, capture_output=True)
    return sha256_of(out / "checkpoint-60")


def sha256_of(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def hf_run(tmp_path: Path, workspace: Path, resume: str) -> Stage:
    """A whole run of Hugging Face's Trainer."""
    path = tmp_path / "hf.yaml"
    path.write_text(HF_RECIPE.replace("{resume}", resume))
    words = ("run", str(path), f"workspace={workspace}", "--no-server", "--json")
    done = refiner(*words)
    assert done.code == 0, done.stderr
    return Stage(workspace, "command")


def test_a_kill_during_hugging_face_s_save_loses_that_save(tmp_path: Path, hf_weights: str) -> None:
    stage = hf_run(tmp_path, tmp_path / "ws", "--die_in_save 3 {resume}")
    assert len(stage.attempts) == 2
    assert json.loads((stage.attempts[-1] / "started.json").read_text())["resumed"]["step"] == 20
    assert sha256_of(stage.folder / stage.result()["output_dir"] / "model") == hf_weights
