"""The run that died at step 100, again: through the command line, on a real Slurm or this machine
alone, on a real quota that another process fills, with everything going wrong that can.

In: a cluster or none, a folder on the quota, a recipe and overrides, faults and the steps at which
they come. Out: a :class:`Telling`: what happened, and the SHA-256 of the final weights, to be held
against those of a run that nothing disturbed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.command import ROOT, Stage, environment, refiner, start
from tests.support.slurm_cluster import Cluster

PROFILE = """\
description: the cluster of a test
partition: {partition}
cpu_stages: slurm
signal_lead_s: 10
"""
LIMIT_S = 600.0


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong once the trainer has logged ``step``."""

    step: int
    name: str
    do: Callable[[Scene], str]


@dataclass
class Telling:
    """What one scenario came to."""

    name: str
    seconds: float
    hashes: dict[str, str]
    trace: list[tuple[int, dict[str, Any]]]
    outcomes: list[dict[str, Any]]
    rounds: list[dict[str, Any]]
    happened: list[str]
    log: str

    @property
    def ends(self) -> str:
        """How many attempts ended in which way: ``3 disk_full, 1 none``."""
        counts = Counter(str(o.get("failure")) for o in self.outcomes)
        return ", ".join(f"{count} {failure}" for failure, count in counts.items())

    @property
    def hit_mid_save(self) -> int:
        """How often a save met errno 122, by the attempts' logs: waited out, or the end of one."""
        lines = self.log.splitlines()
        return sum("saving the checkpoint" in x and "[errno 122" in x for x in lines)


@dataclass
class Scene:
    """A run under way."""

    workspace: Path
    recipe: str
    kind: str
    arguments: tuple[str, ...]
    on: Cluster | None = None
    process: subprocess.Popen[str] | None = None
    happened: list[str] = field(default_factory=list)
    orchestrators: int = 0
    output: list[str] = field(default_factory=list)

    @property
    def stage(self) -> Stage:
        """The stage that suffers."""
        return Stage(self.workspace, self.kind)

    @property
    def cluster(self) -> Cluster:
        """The cluster of a telling on one."""
        assert self.on is not None
        return self.on

    def begin(self) -> None:
        """Start `refiner run`, as a user would, or would again."""
        self.orchestrators += 1
        self.process = start("run", self.recipe, *self.arguments, "--no-server")

    def print_line(self, text: str) -> None:
        """Note what happens."""
        self.happened.append(text)
        print(f"      {text}", flush=True)

    def job(self) -> str:
        """The Slurm job of the newest attempt."""
        try:
            note = json.loads((self.stage.attempts[-1] / "job.json").read_text())
        except (IndexError, FileNotFoundError):
            return ""
        return str(note["job_id"])

    def node(self) -> str:
        """Where that job runs; empty if it does not."""
        job = self.job()
        return self.cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip() if job else ""


# ---------------------------------------------------------------- what goes wrong


def kill_trainer(scene: Scene) -> str:
    """``kill -9`` of the worker."""
    worker = scene.stage.worker
    if worker is None or not worker.alive:
        return "kill -9 of the trainer: it was not there just now"
    worker.kill_group()
    return "kill -9 of the trainer"


def kill_orchestrator(scene: Scene) -> str:
    """``kill -9`` of `refiner run`; after a moment the same command again."""
    scene.process.send_signal(signal.SIGKILL)
    scene.process.wait(30)
    time.sleep(1.0)
    scene.begin()
    return "kill -9 of the orchestrator; the same command again"


def preempt(scene: Scene) -> str:
    """A job of higher priority takes every node for a moment."""
    nodes = scene.cluster.spec.nodes
    scene.cluster.run(
        *("sbatch", "-p", "high", "-N", str(nodes), "--exclusive", "-t", "5"),
        *("-o", "/dev/null", "--wrap", "sleep 3"),
    )
    return "preempted by a job on all nodes"


def node_down(scene: Scene) -> str:
    """The node under the trainer dies; it comes back later."""
    node = scene.node()
    if not node:
        return "node down: the trainer was on none just now"
    scene.cluster.kill_node(node)
    time.sleep(1.0)
    scene.cluster.start_node(node)
    scene.cluster.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    return f"node {node} died"


def time_limit(scene: Scene) -> str:
    """The job's time limit is cut to a minute."""
    job = scene.job()
    done = scene.cluster.run("scontrol", "update", f"jobid={job}", "timelimit=1", check=False)
    return f"time limit of job {job} cut to one minute {done.strip()}"


# ---------------------------------------------------------------- telling it


@contextlib.contextmanager
def filler(scene: Scene, mount: Path, *options: str) -> Iterator[list[dict[str, Any]]]:
    """Another process that fills the quota; yields its rounds, complete after the block."""
    rounds: list[dict[str, Any]] = []
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.support.filler", str(mount)),
            *("--watch", str(scene.workspace), *options),
        ],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield rounds
    finally:
        process.terminate()
        assert process.stdout is not None
        rounds += [json.loads(line) for line in process.stdout]
        process.wait(30)


def tell(
    name: str,
    cluster: Cluster | None,
    mount: Path,
    overrides: Sequence[str],
    *,
    recipe: str = "tiny",
    kind: str = "grpo",
    partition: str = "main",
    hold_s: float = 5.0,
    limit_s: float = LIMIT_S,
    faults: Sequence[Fault] = (),
    fill: Sequence[str] | None = None,
) -> Telling:
    """Run one scenario to its end; ``kind`` is the stage that it is about, and without a cluster
    its jobs are processes of this machine.

    Raises
    ------
    RuntimeError
        The run did not end well, or not in time.
    """
    workspace = mount / name
    arguments = [f"workspace={workspace}", *overrides, "disk.watch_s=2", f"disk.hold_s={hold_s}"]
    arguments.append("dispatch.backoff_s=2")
    if cluster is not None:
        profile = mount.with_name(f"{mount.name}-{partition}.yaml")
        profile.write_text(PROFILE.format(partition=partition))
        arguments += ["dispatch.executor=slurm", f"dispatch.profile={profile}"]
        arguments.append("dispatch.scheduler_poll_s=1")
    scene = Scene(workspace, recipe, kind, tuple(arguments), cluster)
    began = time.monotonic()
    with contextlib.nullcontext() if cluster is None else cluster.joined():
        scene.begin()
        try:
            with contextlib.ExitStack() as stack:
                rounds = [] if fill is None else stack.enter_context(filler(scene, mount, *fill))
                for fault in sorted(faults, key=lambda f: f.step):
                    _until(scene, fault.step, limit_s)
                    at = time.monotonic() - began
                    scene.print_line(f"{at:6.1f} s, step {scene.stage.step}: {fault.do(scene)}")
                _until_over(scene, limit_s - (time.monotonic() - began))
        finally:
            if scene.process is not None and scene.process.poll() is None:
                scene.process.kill()
    return _telling(name, scene, time.monotonic() - began, rounds)


def _telling(name: str, scene: Scene, seconds: float, rounds: list[dict[str, Any]]) -> Telling:
    attempts = scene.stage.attempts
    outcomes = [_outcome(path) for path in attempts]
    log = "\n".join((p / "log.txt").read_text() for p in attempts if (p / "log.txt").exists())
    return Telling(
        name=name,
        seconds=seconds,
        hashes=scene.stage.hashes(),
        trace=scene.stage.trace(),
        outcomes=outcomes,
        rounds=rounds,
        happened=scene.happened,
        log=log,
    )


def _outcome(attempt: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads((attempt / "outcome.json").read_text())["outcome"]
    except FileNotFoundError:
        return {}
    return value


def _until(scene: Scene, step: int, limit_s: float) -> None:
    """Wait until the trainer has logged a step, or the run has ended."""
    deadline = time.monotonic() + limit_s
    while scene.stage.step < step:
        if scene.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"step {step} never came: {_end_of(scene)}")
        time.sleep(0.05)


def _until_over(scene: Scene, limit_s: float) -> None:
    try:
        scene.process.wait(limit_s)
    except subprocess.TimeoutExpired as error:
        status = refiner("status", f"workspace={scene.workspace}")
        raise RuntimeError(f"it did not end in time:\n{status.stdout}\n{status.stderr}") from error
    if scene.process.returncode != 0:
        raise RuntimeError(_end_of(scene))


def _end_of(scene: Scene) -> str:
    scene.process.kill()
    out, err = scene.process.communicate()
    return f"exit code {scene.process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
