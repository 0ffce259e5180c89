"""What publishing costs: on the wire, for the trainer beside it, and in reading.

    python -m tests.bench publishing [--mib 256] [--seconds 60]

One JSON line each, with the goal and whether it was met, against a Hub on loopback:

- a checkpoint that is there already is published again: requests and bytes, beside
  `huggingface_hub.upload_folder` on the same folder in the same run;
- a GRPO step while a large file is uploaded, beside one while nothing is, in turns in one run: the
  upload is a local job as publications are (niced); on a core of its own, and on the trainer's;
- a whole run with a publication: how many bytes were hashed with SHA-256, beside the weights' size.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from infra.host.processes import ProcessId
from infra.jobs.dispatch import LocalDispatcher
from infra.jobs.protocol import AttemptRef, JobRequest, OpenAttempt, WorkerCommand
from infra.publishing import FileToPublish, Publication
from infra.store.provenance import host
from infra.store.stage_records import EVIDENCE
from infra.store.traces import read_metrics
from infra.store.workspace import Workspace
from refiner_core.contract.config import DispatchConfig, PublishConfig, Resources
from refiner_core.models.random_model import save_random_model
from tests.support.command import ROOT, SMALL, Stage, environment, start, wait_until
from tests.support.git_hub import LoopbackHub
from tests.support.plans import claim, small_plan

TURNS = ("nothing", "own core", "nothing", "trainer's core")
#: Seconds of a turn, and before it: an upload that goes on ends, one that begins has begun.
TURN_S, PAUSE_S = 4.0, 1.0
MIB = 1 << 20


def main(argv: list[str] | None = None) -> int:
    """Measure all; 0 even where a goal is missed: the lines say so."""
    parser = argparse.ArgumentParser(prog="tests.bench publishing")
    parser.add_argument("--mib", type=int, default=256, help="size of the weights that are sent")
    parser.add_argument("--seconds", type=float, default=60.0, help="of steps in each condition")
    told = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="refiner-publishing-") as name, _quiet_client():
        folder = Path(name)
        for part in (
            lambda: unchanged(folder, told.mib),
            lambda: steps(folder, told.mib, told.seconds),
            lambda: hashed(folder),
        ):
            for line in part():
                print(json.dumps({**line, "machine": _machine()}), flush=True)
    return 0


# ---------------------------------------------------------------- on the wire


def unchanged(root: Path, mib: int) -> Iterator[dict[str, Any]]:
    """The second publication of the same files."""
    import huggingface_hub

    from infra.hub.target import HubTarget

    publication = _publication(root / "model", mib, "me/ours")
    with LoopbackHub(root / "hub") as hub, _environment(HF_ENDPOINT=hub.url, HF_TOKEN=hub.token):
        target = HubTarget(PublishConfig(target="hub", which="every-save"))  # so that it has a tag
        api = huggingface_hub.HfApi(endpoint=hub.url, token=hub.token)
        api.create_repo("me/rival", private=True)

        def rival() -> None:
            api.upload_folder(repo_id="me/rival", folder_path=root / "model")

        sides: dict[str, Callable[[], Any]] = {
            "ours": lambda: target.publish(publication),
            "rival": rival,
        }
        first = {side: _traffic(hub, call) for side, call in sides.items()}
        again = {side: _traffic(hub, call) for side, call in sides.items()}
        assert hub.contents("me/ours").keys() == hub.contents("me/rival").keys()
    shutil.rmtree(root / "hub")
    for what, ours, rival_, goal in (
        ("requests", again["ours"][0], again["rival"][0], 10),
        ("bytes of large files", again["ours"][1], again["rival"][1], 0),
    ):
        yield {
            "name": f"an unchanged checkpoint of {mib} MiB, {what}",
            "ours": ours,
            "rival": rival_,
            "unit": "lower is better; the rival neither verifies nor tags",
            "goal": f"ours <= {goal}",
            "met": ours <= goal,
        }
    yield {
        "name": f"an unchanged checkpoint of {mib} MiB, CPU",
        "ours": round(again["ours"][2], 3),
        "rival": round(again["rival"][2], 3),
        "ratio": round(again["ours"][2] / again["rival"][2], 3),
        "unit": "s of client and server, lower is better",
        "first": {side: found[:2] for side, found in first.items()},
    }


def _publication(folder: Path, mib: int, repo_id: str) -> Publication:
    """Random weights beside small files; hashes as a stage's record has them."""
    folder.mkdir(exist_ok=True)
    weights = folder / "model.safetensors"
    if not weights.exists():
        with weights.open("wb") as file:
            for _ in range(mib):
                file.write(os.urandom(MIB))
        (folder / "config.json").write_text('{"model_type": "qwen3"}')
        (folder / "tokenizer.json").write_text("{}" * 50_000)
        (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    files = [_described(path) for path in sorted(folder.iterdir()) if path.name not in (EVIDENCE,)]
    listed = [asdict(f.described) for f in files if f.name != "README.md"]
    said = {"format": 1, "kind": "refiner publication", "step": 50, "final": True}
    evidence = json.dumps({**said, "fingerprint": "f" * 64, "files": listed, "facts": {}})
    (folder / EVIDENCE).write_text(evidence)
    files.append(FileToPublish.of_text(EVIDENCE, evidence))
    return Publication(repo_id, tuple(files), 50, True, "f" * 64, "step 50")


def _described(path: Path) -> FileToPublish:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileToPublish(path.name, path.stat().st_size, digest, source=path)


def _traffic(hub: LoopbackHub, call: Callable[[], Any]) -> tuple[int, int, float]:
    """Requests, bytes of large files and CPU seconds of a call."""
    since, used = len(hub.log), time.process_time()
    call()
    # What the client asks once a day of its own accord is nobody's cost here.
    asked = [r for r in hub.log[since:] if r.path != "/api/agent-harnesses"]
    return len(asked), hub.large_bytes(since), time.process_time() - used


# ---------------------------------------------------------------- beside the trainer


def steps(root: Path, mib: int, seconds: float) -> Iterator[dict[str, Any]]:
    """GRPO's steps in turns: nothing beside them, an upload on another core, one on theirs."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield {"name": "a step while an upload runs", "skipped": "this needs two cores"}
        return
    with LoopbackHub(root / "hub") as hub, _training(root / "runs", cores[0]) as grpo:
        os.sched_setaffinity(0, {cores[1]})  # the Hub itself is not the trainer's to bear
        with _uploader(root, hub, mib) as uploader:
            found = _in_turns(grpo, uploader, cores, seconds, forget=hub.log.clear)
            uploads = uploader.uploads
        os.sched_setaffinity(0, set(cores))
    for where, turns in found.items():
        ratios = sorted(turn.beside / turn.alone for turn in turns)
        ratio = statistics.median(ratios)
        yield {
            "name": f"a GRPO step while {mib} MiB are uploaded again and again, on {where}",
            "ours": round(statistics.median(turn.beside for turn in turns), 4),
            "rival": round(statistics.median(turn.alone for turn in turns), 4),
            "ratio": round(ratio, 3),
            "middle_half": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]],
            "unit": "s a step with and without, lower is better; ratio of neighbouring turns",
            "rounds": len(turns),
            "steps": sum(turn.steps for turn in turns),
            "uploads": uploads,
            "goal": "ratio <= 1.10",
            "met": ratio <= 1.10,
        }


class _Turn(NamedTuple):
    """Median seconds of a step beside an upload, and of one alone right before."""

    beside: float
    alone: float
    steps: int


class _Uploader:
    """A niced job that uploads the same weights to new repositories while it is told to."""

    def __init__(self, root: Path, process: ProcessId) -> None:
        self.root, self._process = root, process

    @property
    def uploads(self) -> int:
        path = self.root / "uploads.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def on(self, core: int) -> None:
        """Begin, on that core."""
        os.sched_setaffinity(self._process.pid, {core})
        (self.root / "on").touch()

    def off(self) -> None:
        """End with the upload that goes on."""
        (self.root / "on").unlink(missing_ok=True)


@contextlib.contextmanager
def _uploader(root: Path, hub: LoopbackHub, mib: int) -> Iterator[_Uploader]:
    """As :class:`LocalDispatcher` starts the job of a publish stage."""
    told = {"url": hub.url, "folder": str(root / "model"), "mib": mib, "hub": str(hub.api.root)}
    workspace = Workspace.open(root / "uploads")
    (workspace.root / "told.json").write_text(json.dumps(told))
    stage = claim(workspace, small_plan("data"), "data")
    worker = WorkerCommand(workspace.root, ("-m", "tests.bench.publishing", "upload"))
    nice = DispatchConfig().nice
    request = JobRequest(stage.id, 1, "refiner-bench", Resources(), kind="publish", nice=nice)
    with _environment(HF_ENDPOINT=hub.url, HF_TOKEN=hub.token, PYTHONPATH=str(ROOT)):
        dispatcher = LocalDispatcher(workspace, worker)
        assert dispatcher.submit([request]) == {}
    ready = workspace.root / "process"
    wait_until(ready.exists, "the uploading job")
    process = ProcessId.parse(ready.read_text())
    try:
        yield _Uploader(workspace.root, process)
    finally:
        (workspace.root / "stop").touch()
        attempt = workspace.read_attempt(stage.id, 1)
        assert attempt is not None
        dispatcher.kill(OpenAttempt(AttemptRef(stage.id, 1), attempt))


def upload(root: Path) -> None:
    """What that job does."""
    from infra.hub.target import HubTarget

    told = json.loads((root / "told.json").read_text())
    target, number = HubTarget(PublishConfig(target="hub")), 0
    first = _publication(Path(told["folder"]), told["mib"], "me/upload-0")
    (root / "process").write_text(str(ProcessId.of()))
    while not (root / "stop").exists():
        if not (root / "on").exists():
            time.sleep(0.02)
            continue
        number += 1
        name = f"me/upload-{number}"
        target.publish(Publication(name, *list(vars(first).values())[1:]))
        with (root / "uploads.txt").open("a") as file:
            file.write(f"{name}\n")
        shutil.rmtree(Path(told["hub"]) / f"{name}.git", ignore_errors=True)


@contextlib.contextmanager
def _training(workspace: Path, core: int) -> Iterator[Stage]:
    """A GRPO run that goes on for as long as it is looked at, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    shrunk = [o for o in SMALL if not o.startswith(("grpo.", "sft."))]
    process = start(
        *(
            "run",
            "tiny",
            f"workspace={workspace}",
            *shrunk,
            "--no-server",
            "stages=[data,sft,grpo]",
        ),
        *("data.synthetic_sft_rows=1100", "sft.max_train_steps=55", "sft.eval_freq=1000"),
        *("grpo.num_training_steps=100000", "grpo.save_freq=100000"),
        *("grpo.num_unique_prompts_rollout=2", "grpo.num_samples_per_prompt_rollout=4"),
    )
    os.sched_setaffinity(0, before)
    grpo = Stage(workspace, "grpo")
    try:
        wait_until(lambda: len(grpo.steps()) >= 5, "the first steps", timeout_s=300)
        yield grpo
    finally:
        process.terminate()
        grpo.kill()
        process.wait(60)


def _in_turns(
    grpo: Stage,
    uploader: _Uploader,
    cores: list[int],
    seconds: float,
    forget: Callable[[], None],
) -> dict[str, list[_Turn]]:
    """For each condition, its turns: each is held against the turn without an upload before it, so
    that what else this machine does counts on both sides."""
    found: dict[str, list[_Turn]] = {name: [] for name in TURNS if name != "nothing"}
    alone = 0.0
    for turn in TURNS * max(3, round(seconds / TURN_S)):
        if turn == "nothing":
            uploader.off()
        else:
            uploader.on(cores[0] if turn == "trainer's core" else cores[1])
        time.sleep(PAUSE_S)
        forget()  # the Hub keeps what it was sent
        first = len(grpo.steps()) + 1
        time.sleep(TURN_S)
        lines = read_metrics(grpo.attempts[-1] / "metrics.jsonl")[first:]
        median = statistics.median(float(line.metrics["time/step_s"] or 0.0) for line in lines)
        if turn == "nothing":
            alone = median
        else:
            found[turn].append(_Turn(median, alone, len(lines)))
    uploader.off()
    return found


# ---------------------------------------------------------------- in reading

#: Runs at the start of every process of the run: says how much it has hashed: of files that lie
#: outside its stages (models that are started from), and of everything else.
_COUNTING = """
import atexit, hashlib, os, threading
counts, lock, real, real_digest = [0, 0], threading.Lock(), hashlib.sha256, hashlib.file_digest

class Counted:
    outside = False
    def __init__(self, data=b"", **options):
        self._hash = real(**options)
        if data:
            self.update(data)
    def update(self, data):
        with lock:
            counts[self.outside] += memoryview(data).nbytes
        self._hash.update(data)
    def __getattr__(self, name):
        return getattr(self._hash, name)

class CountedOutside(Counted):
    outside = True

def file_digest(file, digest, **options):
    name = str(getattr(file, "name", os.environ["REFINER_BENCH_RUNS"]))
    ours = Counted if name.startswith(os.environ["REFINER_BENCH_RUNS"]) else CountedOutside
    return real_digest(file, ours if digest == "sha256" else digest, **options)

hashlib.sha256, hashlib.file_digest = Counted, file_digest

def tell():
    with open(os.environ["REFINER_BENCH_HASHED"] + f"/{os.getpid()}", "w") as file:
        words = open("/proc/self/cmdline").read().split(chr(0))
        print(*counts, *words, file=file)

atexit.register(tell)
"""


def hashed(root: Path) -> Iterator[dict[str, Any]]:
    """SHA-256 over a whole run that trains and publishes a model of some size."""
    site, counts, base = root / "site", root / "hashed", root / "base"
    for folder in (site, counts):
        folder.mkdir()
    (site / "sitecustomize.py").write_text(_COUNTING)
    save_random_model(base, hidden_size=512, num_hidden_layers=4, intermediate_size=1024, seed=0)
    workspace = root / "hashed-runs"
    path = os.pathsep.join([str(site), environment()["PYTHONPATH"]])
    told = {"REFINER_BENCH_HASHED": str(counts), "REFINER_BENCH_RUNS": str(workspace / "stages")}
    with LoopbackHub(root / "hashing-hub") as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "PYTHONPATH": path, **told}
        with _environment(**settings):
            process = start(
                *("run", "tiny", f"workspace={workspace}", *SMALL, f"model.name_or_path={base}"),
                *("stages=[data,sft,publish]", "publish.target=hub", "publish.repo_id=me/hashed"),
                "--no-server",
            )
            _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said
    weights = sum(
        f["bytes"]
        for f in Stage(workspace, "sft").result()["files"]
        if f["path"].endswith(".safetensors")
    )
    ours, outside = {"sft-": 0, "publish-": 0}, {"sft-": 0, "publish-": 0}
    for file in counts.iterdir():
        own, other, line = file.read_text().split(maxsplit=2)
        for kind in ours:
            if f" {kind}" in line and "flows.worker" in line:
                ours[kind] += int(own)
                outside[kind] += int(other)
    share = sum(ours.values()) / weights
    yield {
        "name": "bytes hashed by a training stage and its publication, over those of the weights",
        "ours": round(share, 2),
        "unit": f"of {weights / MIB:.1f} MiB; training {ours['sft-'] / MIB:.1f}, publishing "
        f"{ours['publish-'] / MIB:.1f}; besides, to plan its command again, publishing "
        f"{outside['publish-'] / MIB:.1f} MiB of what a run starts from",
        "goal": "each file once: < 1.1",
        "met": share < 1.1,
    }


# ---------------------------------------------------------------- the rest


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet_client() -> Iterator[None]:
    with _environment(HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_PROGRESS_BARS="1"):
        yield


def _machine() -> str:
    found = host()
    return f"{found['cpu']}, {found['cores']} cores"


if __name__ == "__main__":
    if sys.argv[1:2] == ["upload"]:
        upload(Path(sys.argv[sys.argv.index("--workspace") + 1]))
        sys.exit(0)
    sys.exit(main())
