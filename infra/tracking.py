"""W&B as a second place for metrics; our own JSON lines are authoritative.

In: ``log(step, metrics)``. Out: an offline (or online) W&B run, whose id is the stage's, whose
group is ``tracking.group`` (a sweep's name; else the recipe's) and whose job type is the stage's
kind. It starts with the first metric (starting costs a second or two), and every failure in it is
one warning in the log, never an error. ``tracking.json`` beside the files of an online run has its
address.

Offline runs are sent later, from a node with network (:func:`send`). A stage is one W&B run
however many attempts it has: all have the stage's id, and are sent in order. Sent files are
recorded with their size, so that repeated calls send only what is new. The key stays where wandb
reads it (``WANDB_API_KEY``, or the store of `wandb login`).
"""

from __future__ import annotations

import configparser
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.host.processes import environment, run_program
from infra.store import atomic
from infra.store.atomic import no_space_guard
from infra.store.workspace import Workspace
from refiner_core.contract.config import TrackingConfig
from refiner_core.contract.errors import RefinerError, SystemOutage, UnsupportedError

#: Address of an online run: `{"url": …}`.
ADDRESS_FILE = "tracking.json"
log = logging.getLogger(__name__)

#: Beside the offline folders of an attempt: folder -> bytes of its file when it was sent.
SENT_FILE = "sent.json"
CLOUD = "https://api.wandb.ai"
#: Limits for a server's first answer, and for accepting a batch, seconds.
ANSWER_S, BATCH_S = 10.0, 900.0
_BATCH = 50
_FINISHED = re.compile(r"Finished syncing (?P<name>\S+)")
_ADDRESS = re.compile(r"\bView run .* at (?P<url>https?://\S+)")


@dataclass(frozen=True)
class TrackedRun:
    """Names of a run. ``run_id`` is the same for every attempt at a stage."""

    run_id: str
    name: str
    group: str
    job_type: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)


def without_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's identity for others: paths of this machine are masked."""
    return {
        name: "(a path)" if isinstance(value, str) and value.startswith(("/", "~")) else value
        for name, value in values.items()
    }


class Tracker:
    """A metrics sink that never raises."""

    def __init__(self, config: TrackingConfig, run: TrackedRun) -> None:
        self._config, self._run = config, run
        self._wandb_run: Any = None
        self._off = config.wandb == "disabled"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on one step's numbers, without NaN and infinity."""
        if self._off:
            return
        try:
            if self._wandb_run is None:
                self._wandb_run = start_run(self._config, self._run)
                self._note_address()
            finite = {k: float(v) for k, v in metrics.items() if math.isfinite(float(v))}
            self._wandb_run.log(finite, step=step)
        except Exception as error:  # a tracker must never stop a training, whatever it raises
            self._give_up("logging to W&B", error)

    def finish(self, exit_code: int = 0) -> None:
        """End the run, if it was started."""
        run, self._wandb_run = self._wandb_run, None
        if run is None:
            return
        try:
            run.finish(exit_code=exit_code)
        except Exception as error:  # as above
            self._give_up("finishing the W&B run", error)

    def _note_address(self) -> None:
        """Record the address of an online run; an offline one has none."""
        address = getattr(self._wandb_run, "url", None)
        if self._config.wandb != "online" or not address:
            return
        try:
            atomic.write_json(self._run.folder / ADDRESS_FILE, {"url": str(address)})
        except OSError as error:
            log.warning("the address of the W&B run, %s, could not be recorded: %s", address, error)

    def _give_up(self, doing: str, error: Exception) -> None:
        self._off = True
        log.warning("%s failed; metrics continue in metrics.jsonl only: %s", doing, error)


def start_run(config: TrackingConfig, run: TrackedRun) -> Any:
    """A W&B run that stores only its input; all its files are in ``run.folder``."""
    folder = run.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        os.environ[name] = str(folder)
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    settings = wandb.Settings(
        console="off",
        save_code=False,
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,  # it would record the command line and the environment's details
        x_disable_stats=True,
        silent=True,
    )
    online = config.wandb == "online"
    return wandb.init(
        project=config.project,
        entity=config.entity,
        mode=config.wandb,
        id=run.run_id,
        name=run.name,
        group=run.group,
        notes=config.notes or None,
        tags=list(config.tags) or None,
        job_type=run.job_type,
        dir=str(folder),
        config=dict(run.config),
        resume="allow" if online else None,
        settings=settings,
    )


def tracked_address(folder: Path) -> str | None:
    """Address of the online run with its files in ``folder``; None for any other."""
    try:
        noted = atomic.read_json(folder / ADDRESS_FILE) or {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read: %s", folder / ADDRESS_FILE, error)
        return None
    address = noted.get("url")
    return str(address) if address else None


@dataclass(frozen=True)
class OfflineRun:
    """One attempt's offline run.

    Attributes
    ----------
    stage_id, attempt
        Its origin; a sweep's report has its name and 0.
    folder
        Argument of ``wandb sync``.
    bytes
        Present size of its file.
    sent_bytes
        Size when it was sent; 0: never.
    """

    stage_id: str
    attempt: int
    folder: Path
    bytes: int
    sent_bytes: int = 0

    @property
    def is_new(self) -> bool:
        """True if it has data that were not sent."""
        return self.bytes != self.sent_bytes


def offline_runs(workspace: Workspace, stage_ids: Iterable[str]) -> list[OfflineRun]:
    """The offline runs of these stages, attempts in order."""
    found = []
    for stage_id in dict.fromkeys(stage_ids):
        paths = workspace.layout.stage(stage_id)
        for number in paths.attempt_numbers():
            found += offline_runs_in(paths.attempt(number).tracker, stage_id, number)
    return found


def offline_runs_in(tracker: Path, stage_id: str, attempt: int = 0) -> list[OfflineRun]:
    """The offline runs in one tracker's folder, oldest first."""
    sent = atomic.read_json(tracker / SENT_FILE) or {}
    found = []
    for folder in sorted((tracker / "wandb").glob("offline-run-*")):
        size = sum(p.stat().st_size for p in folder.glob("*.wandb"))
        if size:
            found.append(OfflineRun(stage_id, attempt, folder, size, int(sent.get(folder.name, 0))))
    return found


def send(runs: Sequence[OfflineRun], tell: Callable[[int, int], None]) -> int:
    """Send the runs with new data; returns their number.

    Parameters
    ----------
    tell
        Called after each batch with the numbers of sent runs and of all.

    Raises
    ------
    SystemOutage
        The server cannot be reached, or refuses; the sent runs are recorded.
    UnsupportedError
        There is no login.
    """
    new = [run for run in runs if run.is_new]
    if not new:
        return 0
    check_server(server_address())
    done = 0
    for begin in range(0, len(new), _BATCH):  # attempts at a stage in order, also across batches
        batch = new[begin : begin + _BATCH]
        said, code = _sync(batch)
        finished = {Path(name).name for name in _FINISHED.findall(said)}
        sent = [r for r in batch if code == 0 or r.folder.name in finished]
        _note(sent, said)
        done += len(sent)
        tell(done, len(new))
        if code != 0:
            raise _refused(said, done, len(new))
    return done


def server_address() -> str:
    """The server that wandb would use: its variable, its settings file, or the cloud."""
    if given := os.environ.get("WANDB_BASE_URL"):
        return given
    home = os.environ.get("WANDB_CONFIG_DIR")
    folder = Path(home) if home else Path("~/.config/wandb").expanduser()
    settings = configparser.ConfigParser()
    try:
        settings.read(folder / "settings")
        return settings.get("default", "base_url", fallback=CLOUD)
    except configparser.Error:  # wandb will report it itself
        return CLOUD


def check_server(address: str) -> None:
    """Check within seconds whether the server answers: wandb itself would try for hours.

    Raises
    ------
    SystemOutage
        It does not.
    """
    import httpx

    try:
        httpx.get(f"{address.rstrip('/')}/healthz", timeout=ANSWER_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SystemOutage(
            f"The W&B server {masked_address(address)} does not answer ({error}).",
            expected="a node from which it can be reached",
            fix="run the same command where the network is, or set WANDB_BASE_URL to your server",
        ) from error


def _sync(batch: Sequence[OfflineRun]) -> tuple[str, int]:
    """Output of wandb, and its exit code."""
    with tempfile.TemporaryDirectory(prefix="refiner-wandb-") as folder:
        (Path(folder) / "wandb").mkdir()
        words = [sys.executable, "-m", "wandb", "sync", "--yes", "--include-synced"]
        variables = {**environment(), "WANDB_DIR": folder, "PYTHONSAFEPATH": "1"}
        variables.pop("WANDB_MODE", None)  # `offline` would keep it from sending
        variables.pop("WANDB_SILENT", None)
        try:
            done = run_program([*words, *(str(run.folder) for run in batch)], BATCH_S, variables)
        except subprocess.TimeoutExpired:
            return f"It was not done after {BATCH_S:.0f} s.", 124
    return done.stdout + done.stderr, done.returncode


def _note(sent: Sequence[OfflineRun], said: str) -> None:
    """Record the sent runs, with their addresses."""
    addresses = {url.rstrip("/").rpartition("/")[2]: url for url in _ADDRESS.findall(said)}
    for run in sent:
        tracker = run.folder.parent.parent
        with no_space_guard(tracker, "recording what W&B has"):
            noted = atomic.read_json(tracker / SENT_FILE) or {}
            atomic.write_json(tracker / SENT_FILE, {**noted, run.folder.name: run.bytes})
            file = next(run.folder.glob("run-*.wandb"), None)  # named after the run's id
            if file and (address := addresses.get(file.stem.removeprefix("run-"))):
                atomic.write_json(tracker / ADDRESS_FILE, {"url": address})


def _refused(said: str, done: int, total: int) -> RefinerError:
    if "No API key" in said or "not logged in" in said.lower():
        return UnsupportedError(
            "There is no login to W&B here.",
            expected="a key in WANDB_API_KEY, or one that `wandb login` has stored",
            fix="set it, and run the same command again",
        )
    lines = [line.removeprefix("wandb: ").strip() for line in said.splitlines() if line.strip()]
    return SystemOutage(
        f"W&B accepted {done} of {total} runs and then: {lines[-1][:200] if lines else 'nothing'}",
        expected="all of them sent",
        fix="run the same command again; sent runs are not sent twice",
    )


def masked_address(address: str) -> str:
    """An address without any name or password in it."""
    return re.sub(r"//[^/@]*@", "//", address)
