"""Sections that only control a run: jobs and their resources, tracking, disk, notifications.

Every field is execution: none changes what is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass as plain_dataclass
from typing import Literal

from pydantic.dataclasses import dataclass

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.marks import STRICT, execution, section


@dataclass(frozen=True, config=STRICT)
class Resources:
    """Resources of a stage's job. Execution only: they do not change results."""

    gpus: int = execution(0, ge=0, doc="GPUs per node")
    nodes: int = execution(1, ge=1, doc="number of nodes")
    cpus: int = execution(1, ge=1, doc="CPU cores per node")
    memory_gb: int = execution(4, ge=1, doc="host memory per node, GiB")
    time_limit_min: int = execution(60, ge=1, doc="wall-clock limit of one attempt, minutes")


@dataclass(frozen=True, config=STRICT)
class TrackingConfig:
    """W&B as a sink; our own JSON lines are authoritative."""

    wandb: Literal["offline", "online", "disabled"] = execution("offline", doc="W&B mode")
    project: str = execution("refiner", doc="W&B project")
    entity: str | None = execution(None, doc="W&B entity; default: that of your account")
    group: str | None = execution(
        None, doc="W&B group; default: the recipe, or for a sweep's trials the sweep"
    )
    notes: str = execution("", doc="notes on the run, shown by `refiner runs`, `status` and W&B")
    tags: tuple[str, ...] = execution(
        (), doc="tags of the run, shown by `refiner runs`, W&B, Prefect"
    )


@dataclass(frozen=True, config=STRICT)
class RetryConfig:
    """How many attempts in a row may end in a failure class without progress.

    An attempt with progress (the next one resumed from a later checkpoint) resets the count; -1
    is no limit. Classes that are not named here (bad configuration, bad data, not finite,
    cancelled) are never retried.
    """

    preempted: int = execution(-1, ge=-1, doc="the scheduler gave the node to another job")
    time_limit: int = execution(2, ge=-1, doc="the job's time was up")
    node_failure: int = execution(10, ge=-1, doc="the node died; it is avoided from then on")
    launch_failure: int = execution(5, ge=-1, doc="the scheduler could not start the job")
    system_outage: int = execution(-1, ge=-1, doc="the scheduler or the file system did not answer")
    killed: int = execution(2, ge=-1, doc="the worker was gone without an outcome")
    hung: int = execution(2, ge=-1, doc="no progress for `dispatch.hung_after_s`")
    out_of_memory: int = execution(1, ge=-1, doc="the host's memory did not suffice")
    gpu_out_of_memory: int = execution(1, ge=-1, doc="the GPU's memory did not suffice")
    gpu_error: int = execution(
        3, ge=-1, doc="CUDA or NCCL failed; the node is avoided from then on"
    )
    disk_full: int = execution(
        -1, ge=-1, doc="no space (it waits for space first, see `disk.wait_min`)"
    )
    judge_outage: int = execution(20, ge=-1, doc="the judge did not answer often enough")
    judge_unusable: int = execution(
        1,
        ge=-1,
        doc="the judge's answers were not judgements (another scale, no score, cut by length)",
    )
    environment_outage: int = execution(
        20, ge=-1, doc="an environment or its user failed in too many episodes"
    )
    hub_outage: int = execution(
        20, ge=-1, doc="the Hub did not answer, or asked to wait for too long"
    )
    bug: int = execution(1, ge=-1, doc="an unknown error; the same one twice at one step stops")


@dataclass(frozen=True, config=STRICT)
class DispatchConfig:
    """Where jobs run, and the orchestrator's time-outs and retries."""

    executor: Literal["local", "slurm"] = execution(
        "local", doc="this machine, or Slurm through submitit"
    )
    profile: str | None = execution(
        None, doc="the cluster: a shipped profile's name or a YAML file (with executor=slurm)"
    )
    poll_s: float = execution(0.5, ge=0, doc="least seconds between checks of the workspace")
    scheduler_poll_s: float = execution(10.0, gt=0, doc="seconds between queries to the scheduler")
    grace_s: float = execution(60.0, ge=0, doc="seconds a job gets to save after a request to stop")
    heartbeat_timeout_s: float = execution(
        900.0, gt=0, doc="no heartbeat for this long counts as hung"
    )
    hung_after_s: float = execution(
        7200.0, gt=0, doc="no progress for this long counts as hung, in whatever phase"
    )
    hung_floor_s: float = execution(
        20.0, gt=0, doc="added to each learned limit of a phase; the last word is `hung_after_s`"
    )
    max_parallel: int = execution(2, ge=1, doc="local jobs at a time")
    nice: int = execution(
        10,
        ge=0,
        doc="niceness of local jobs that export, publish, or evaluate a step, in favour of "
        "training (0: none, 19: most)",
    )
    backoff_s: float = execution(
        30.0, ge=0, doc="pause before an attempt after a judge outage or launch failure; doubles"
    )
    retries: RetryConfig = section(RetryConfig, doc="attempts per failure class")


@dataclass(frozen=True, config=STRICT)
class DiskConfig:
    """Disk space: how it is measured, and what happens when it runs short."""

    probe: str = execution(
        "auto",
        doc="how free space is measured: `auto`, `statvfs`, `quota`, `xfs`, `btrfs`, "
        "`lustre`, `gpfs`, or `command:PROGRAM ARGUMENTS`",
    )
    pattern: str | None = execution(
        None,
        doc="regular expression for a `command:` probe with groups `used` and `limit` (or `free`), "
        "bytes or with a unit, and optionally `inodes_used` and `inodes_limit`",
    )
    limit_gb: float | None = execution(None, doc="a limit of your own for the workspace, GiB")
    inode_limit: int | None = execution(None, doc="a limit of your own on files and folders")
    margin_gb: float = execution(0.0, ge=0, doc="space that is always left free, GiB")
    watch_s: float = execution(30.0, gt=0, doc="seconds between checks of free space")
    warn_share: float = execution(0.9, ge=0, le=1, doc="warn when more than this share is used")
    reclaim: bool = execution(True, doc="delete what the policy allows when space is short")
    wait_min: float = execution(
        1440.0,
        ge=0,
        doc="minutes that a paused stage waits for space before it is given up (resumable)",
    )
    too_small: Literal["refuse", "wait"] = execution(
        "refuse",
        doc="a run whose checkpoints exceed an empty disk or quota: `refuse` it before anything "
        "starts, or let it `wait` for a larger one",
    )
    hold_s: float = execution(
        60.0,
        ge=0,
        doc="seconds that a running job waits for space before a save, then it ends resumable",
    )
    ledger: str | None = execution(
        None, doc="folder of the reservations, to share it between workspaces on one quota"
    )
    watch_caches: tuple[str, ...] = execution(
        ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "WANDB_DIR"),
        doc="environment variables (or paths) of caches that `refiner disk` shows; their own tools "
        "empty them (`hf cache prune`)",
    )


@dataclass(frozen=True, config=STRICT)
class NotifyConfig:
    """Notifications of runs and sweeps. None are sent unless a channel is named."""

    on: tuple[Literal["finished", "failed", "paused", "stopped"], ...] = execution(
        ("finished", "failed", "paused"),
        doc="events to report: the run is `finished`; it has `failed`; a stage is `paused` (no "
        "space, an outage); it was `stopped` on request",
    )
    urls: tuple[str, ...] = execution(
        (),
        doc="NAMES of environment variables, or paths of files, that hold addresses as Apprise "
        "writes them (slack://…, mailto://…, https://…), one a line",
    )
    command: str | None = execution(
        None,
        doc="shell command that gets the message as JSON on its standard input, and its fields as "
        "REFINER_TITLE, REFINER_TEXT, …",
    )
    webhook: str | None = execution(
        None, doc="former name of `urls`, for one variable; removed in the next version"
    )
    after_min: float = execution(
        0.0, ge=0, doc="send nothing for runs that end within so many minutes (being watched)"
    )
    pause_min: float = execution(
        1.0, ge=0, doc="send nothing for pauses that end within so many minutes"
    )


Channel = Literal["command", "url"]


@plain_dataclass(frozen=True)
class NotifyChannel:
    """One channel of a message.

    ``what`` is a shell command, or the environment variable or file that holds addresses.
    """

    channel: Channel
    what: str

    @property
    def name(self) -> str:
        """Name in records and messages."""
        return self.channel if self.channel == "command" else self.what


def alarms_of(notify: NotifyConfig) -> tuple[NotifyChannel, ...]:
    """The channels of a recipe; none if it sends no notifications."""
    command = [NotifyChannel("command", notify.command)] if notify.command is not None else []
    names = [*notify.urls, *([notify.webhook] if notify.webhook is not None else [])]
    return (*command, *(NotifyChannel("url", name) for name in dict.fromkeys(names)))


_ADDRESS = re.compile(r"(?i)\bhttps?://")


def check_places(field: str, names: Iterable[str]) -> None:
    """Refuse an address in place of the name of its variable or file."""
    if not all(map(is_place, names)):
        raise ConfigurationError(
            f"`{field}` has an address in it, or something else that is no variable name.",
            expected="the name of the environment variable, or the path (from / or ~/) of the "
            "file, that holds the address: it is often a secret, and would be part of every "
            "record of the run",
            fix="export MY_HOOK=…, and name MY_HOOK here",
        )


def check_notify(notify: NotifyConfig) -> None:
    """Refuse an invalid `notify` section, or one that would put an address into records. The value
    is not repeated: it may be a secret."""
    check_places("notify.urls", notify.urls)
    check_places("notify.webhook", (notify.webhook or "URL",))
    command = notify.command
    if command is not None and (not command.strip() or _ADDRESS.search(command)):
        raise ConfigurationError(
            "`notify.command` is empty, or has an address in it.",
            expected="a shell command, which gets the message as JSON on its standard input, and "
            "no address: it is part of every record of the run, and its readers could often post",
            fix="set e.g. notify.command='cat >> ~/told.jsonl', or export MY_WEBHOOK=…, and write "
            '"$MY_WEBHOOK" in the command, in single quotes',
        )


# ---------------------------------------------------------------- addresses and names

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_place(name: str) -> bool:
    """Whether this names a variable or, from the root or home, a file: addresses are often secrets,
    and do not belong into a recipe."""
    return bool(VARIABLE.fullmatch(name)) or (name.startswith(("/", "~/")) and "://" not in name)
