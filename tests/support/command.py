"""The `refiner` command as a user runs it: a process of its own, its output, its records."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.host.processes import ProcessId
from infra.store.traces import read_metrics
from refiner_core.contract.proofs import MEASURED

ROOT = Path(__file__).resolve().parents[2]
#: The tiny recipe cut down to a few seconds a stage. Everything on the path is the real thing.
SMALL = (
    "data.synthetic_sft_rows=160",
    "data.synthetic_rl_rows=40",
    "sft.max_train_steps=4",
    "sft.pack_length=512",
    "sft.eval_freq=2",
    "sft.save_freq=1",
    "grpo.num_training_steps=5",
    "grpo.num_unique_prompts_rollout=2",
    "grpo.num_samples_per_prompt_rollout=4",
    "grpo.save_freq=1",
    "evaluate.max_prompts=4",
    "evaluate.num_samples=2",
    "evaluate.bootstrap_samples=200",
    "publish.malformed=true",  # so little training leaves a model that says nothing yet
    "tracking.wandb=disabled",
    "dispatch.nice=0",
)
#: More overrides of the small run that several tests look at: long enough to be interrupted.
LONGER = (
    *("evaluate.models=[base,grpo]", "sft.max_train_steps=8", "sft.save_freq=4"),
    *("grpo.num_training_steps=12", "grpo.save_freq=4"),
)
_TRAINER = ROOT / "tests" / "support" / "external_trainer.py"
_WEIGHTS = ROOT / "refiner_core" / "models" / "tiny" / "model.safetensors"
#: What a clock or a judge's store has to do with; never part of a comparison of two runs.
TIMED = MEASURED


def own_trainer(*options: object) -> tuple[str, ...]:
    """Overrides of the recipe `own-trainer`: a script that saves every 4 steps and hardly needs a
    processor, for tests of what happens around a training. With ``"--until", FILE`` it waits after
    step 8 until there is a file."""
    run = (
        sys.executable,
        str(_TRAINER),
        "--out {output} --seed {seed} {resume}",
        *map(str, options),
    )
    settings = {
        "run": " ".join((*run, "--like", str(_WEIGHTS))),
        "resume_arguments": "--resume_from {checkpoint}",
        "checkpoints": "ckpt_*",
        "complete": "file:trainer.json",
        "progress_pattern": r"step (?P<step>\d+)/(?P<total>\d+) loss (?P<loss>\S+)",
    }
    return (
        *(f"command.{name}={json.dumps(value)}" for name, value in settings.items()),
        *("tracking.wandb=disabled", "dispatch.nice=0", "dispatch.poll_s=0.1"),
    )


@dataclass(frozen=True)
class Finished:
    """A call that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """What ``--json`` printed."""
        return json.loads(self.stdout)


def command(*args: str) -> list[str]:
    """The command line of a process that is not in the checkout's folder."""
    return [sys.executable, "-m", "flows.cli.main", *args]


def environment() -> dict[str, str]:
    """As a user's shell would have it, with our packages importable."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def refiner(*args: str, cwd: Path | None = None, timeout_s: float = 500) -> Finished:
    """Run the command to its end."""
    return finished(command(*args), cwd, environment(), timeout_s)


def finished(
    words: Sequence[str],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 500,
) -> Finished:
    """Run any program to its end."""
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=cwd, env=env, timeout=timeout_s
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def called(*args: str) -> Finished:
    """Run the command in this process: for what starts no process, and does not last."""
    from flows.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*args])
    return Finished(code, out.getvalue(), err.getvalue())


def on_terminal(*args: str) -> bytes:
    """What the command writes to a terminal; it has to end well."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command(*args),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**environment(), "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(follower)
    said = b""
    with contextlib.suppress(OSError):  # how a pseudo-terminal says that its other end is closed
        while piece := os.read(leader, 65536):
            said += piece
    os.close(leader)
    assert process.wait(400) == 0, said
    return said


def start(*args: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start the command in a process group of its own, as a shell would."""
    return subprocess.Popen(
        command(*args),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment(),
        start_new_session=True,
    )


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 240) -> Any:
    """The first true value of ``condition``.

    Raises:
        TimeoutError: it stayed false.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")


class Stage:
    """One stage's files in a workspace, while it runs and after."""

    def __init__(self, workspace: Path, kind: str) -> None:
        self.workspace, self.kind = workspace, kind

    @property
    def folder(self) -> Path | None:
        """The stage's folder, once there is one."""
        return next(iter(sorted(self.workspace.glob(f"stages/{self.kind}-*"))), None)

    @property
    def attempts(self) -> list[Path]:
        """Attempt folders, oldest first."""
        return sorted(self.folder.glob("attempts/0*")) if self.folder else []

    @property
    def phase(self) -> str:
        """What the newest attempt's heartbeat says it is doing."""
        beat = self._json("heartbeat.json")
        return str((beat.get("progress") or {}).get("phase", ""))

    @property
    def step(self) -> int:
        """The newest step that it has logged; of a trainer that logs none, that it has shown."""
        progress = self._json("heartbeat.json").get("progress") or {}
        shown = int(progress.get("done", 0)) if progress.get("phase") == "train" else 0
        return max(self.steps(), default=shown)

    @property
    def worker(self) -> ProcessId | None:
        """The newest attempt's worker."""
        found = self._json("started.json").get("process")
        return ProcessId.parse(found) if found else None

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is half-written right now."""
        return bool(self.folder and list(self.folder.glob("checkpoints/.tmp-*")))

    def steps(self) -> list[int]:
        """Steps that the newest attempt's metrics have."""
        path = self.attempts[-1] / "metrics.jsonl" if self.attempts else None
        return [line.step for line in read_metrics(path)] if path and path.exists() else []

    def trace(self) -> list[tuple[int, dict[str, Any]]]:
        """Every metric of every step of the newest attempt, without what a clock has measured."""
        return [
            (line.step, {k: v for k, v in line.metrics.items() if not k.startswith(TIMED)})
            for line in read_metrics(self.attempts[-1] / "metrics.jsonl")
        ]

    def result(self) -> dict[str, Any]:
        """The finished stage's result."""
        assert self.folder is not None
        value: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return value

    def hashes(self) -> dict[str, str]:
        """SHA-256 of every output file."""
        return {f["path"]: f["sha256"] for f in self.result()["files"]}

    def kill(self) -> None:
        """``kill -9`` of the worker and everything it has started."""
        self.worker.kill_group()

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value: dict[str, Any] = json.loads((self.attempts[-1] / name).read_text())
        except (IndexError, FileNotFoundError):
            return {}
        return value


def kill_orchestrator(process: subprocess.Popen[str]) -> None:
    """``kill -9`` of a started command; its jobs live on."""
    process.send_signal(signal.SIGKILL)
    process.wait(30)
