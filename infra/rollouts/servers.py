"""Rollout servers as children of a trainer's attempt: started, replaced, ended with it.

In: the recipe and each server's resources. Out: addresses on loopback, once they answer. Each runs
under :mod:`infra.process.watchdog` in a session of its own, so that none outlives the trainer,
however it ends. They are started with ``VLLM_SERVER_DEV_MODE=1``, which enables the routes that
change weights, and with our middleware, which asks for the key on all routes. The key is only in
the environment, because command lines can be read by everyone on a node.

Their folder in memory (``/dev/shm``) does not outlive this process: it is removed at the end of
the ``with`` block; by a second process (:mod:`infra.process.watchdog`) when this one is killed;
and by the next one on this node when all of them were killed at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil

from infra.host.gpus import VISIBLE
from infra.host.processes import ProcessId, host_name
from infra.process import watchdog
from infra.process.child import kill_stale_processes
from infra.ranks.messages import JOB_GPUS, visible
from infra.services.process import (
    ListenAddress,
    NotReady,
    ServerProcess,
    ask_server,
    server_environment,
    shell_text,
    split_words,
    vllm_words,
)
from refiner_core.contract.config import (
    EvaluateConfig,
    ModelConfig,
    RecipeConfig,
    RolloutServerConfig,
)
from refiner_core.contract.errors import ConfigurationError, KilledError
from refiner_core.contract.placement import placement_of, sampling_section, sampling_servers
from refiner_core.contract.types import Endpoint, RolloutServers
from refiner_core.generation.saving import hand_over_of
from refiner_core.generation.vllm import extension
from refiner_core.generation.vllm.client import VllmGenerator
from refiner_core.generation.vllm.sync import WeightSync, tolerance_of
from refiner_core.generation.vllm.wire import MODEL
from refiner_core.training.ranks import ENVIRONMENT

#: Class that completes a reload; its module is on the server's import path and needs only vLLM.
EXTENSION = "refiner_vllm_extension.CompleteReload"
#: Class in the same module that asks for the key on the routes that vLLM leaves open.
MIDDLEWARE = "refiner_vllm_extension.KeyOnEveryRoute"
#: How long a server that is asked to end continues its requests, seconds.
SHUTDOWN_S = 5
LOOPBACK = "127.0.0.1"
#: Token limit of one pass of a server without GPUs.
_CPU_BATCHED_TOKENS = 4096
#: Settings of our launcher of ranks, which a server must not see.
_RANKS = (*ENVIRONMENT, "DS_ACCELERATOR", JOB_GPUS)

T = TypeVar("T")
log = logging.getLogger(__name__)
_PREFIX = "refiner-rollouts"
_NAME = re.compile(rf"{_PREFIX}-(?P<where>.+)-(?P<pid>\d+)-(?P<started>\d+(?:\.\d+)?)")
_POLL_S = 0.1
_PROBE_S = 10.0
_PORTS_TRIED = 5
#: Grace period, beyond the time for running requests, seconds.
_GRACE_S = SHUTDOWN_S + 10.0
#: Folder below a stage's, with a number for each server, as its mark.
MARK_NAME = "rollout-servers"


@dataclass(frozen=True)
class ServerResources:
    """Resources of one server.

    Attributes
    ----------
    gpus
        Its GPUs, in the form of ``CUDA_VISIBLE_DEVICES``; empty without.
    extension
        Folder of the worker extension.
    mark
        Marks its processes, so that its leftovers can be found.
    """

    gpus: str
    extension: Path
    mark: Path
    key: str = field(default="", repr=False)


def rollout_server_text(config: RecipeConfig, at: ListenAddress, weights: Path) -> str:
    """The shell text of a server; the user's ``args`` come last, and so take precedence."""
    grpo, server = config.grpo, config.grpo.rollout_server
    words = [*vllm_words(server.python), str(weights), *at.options, "--served-model-name", MODEL]
    # Else a model's own generation_config.json overrides the defaults of requests.
    words += ["--generation-config", "vllm"]
    # Else log-probabilities are those before temperature and truncation.
    words += ["--logprobs-mode", "processed_logprobs"]
    words += ["--dtype", config.model.dtype, "--max-model-len", str(grpo.max_token_length)]
    words += ["--max-num-seqs", str(grpo.generation_batch_size), "--seed", str(config.seed)]
    if not grpo.resources.gpus:
        # With a prompt read in pieces, vLLM takes back a seeded draw, which its generators on the
        # CPU cannot (0.32: "CPU Generator does not use offset"), and the engine dies.
        tokens = max(_CPU_BATCHED_TOKENS, grpo.max_token_length)
        words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(tokens)]
    if grpo.vllm_tensor_parallel_size > 1:
        words += ["--tensor-parallel-size", str(grpo.vllm_tensor_parallel_size)]
    words += ["--worker-extension-cls", EXTENSION, "--middleware", MIDDLEWARE]
    words += ["--shutdown-timeout", str(SHUTDOWN_S), "--disable-uvicorn-access-log"]
    return shell_text(server, shlex.join([*words, *split_words(server.args)]))


def rollout_environment(
    place: ServerResources, given: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a server: the user's own, without the settings of our processes."""
    made = server_environment("vllm", place.key, str(place.mark), given)
    kept = {n: v for n, v in made.items() if n not in _RANKS}
    paths = [str(place.extension), *kept.get("PYTHONPATH", "").split(os.pathsep)]
    kept["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    kept |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if place.gpus:
        kept[VISIBLE] = place.gpus
    return kept


@contextmanager
def memory_folder(parent: Path) -> Iterator[Path]:
    """A new folder below ``parent`` that only its owner can read; leftovers are removed first.

    Raises
    ------
    ConfigurationError
        No folder can be created there.
    """
    remove_stale_files(parent)
    me = ProcessId.of()
    started = f"{me.started:.0f}" if me.boot else f"{me.started:.2f}"
    folder = parent / f"{_PREFIX}-{_where()}-{me.pid}-{started}"
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigurationError(
            f"Weights for rollout servers cannot be put into {parent} ({error})",
            expected="a writable folder in memory",
            fix="set grpo.rollout_server.weights_dir",
        ) from error
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(watchdog.__file__)), "--sweep", str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        watchdog.remove(str(folder))
        assert watcher.stdin is not None
        watcher.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            watcher.wait(10)


def remove_stale_files(parent: Path) -> None:
    """Remove folders of this user's dead processes on this machine."""
    for folder in parent.glob(f"{_PREFIX}-{_where()}-*"):
        found = _NAME.fullmatch(folder.name)
        if found is None or not watchdog.is_private(str(folder)):
            continue
        # Ticks since this boot, which memory does not outlive.
        boot, started = ProcessId.of().boot, float(found["started"])
        owner = ProcessId(host_name(), int(found["pid"]), started, boot)
        if not owner.alive:
            log.warning("removing %s, left by a process that is gone", folder)
            watchdog.remove(str(folder))


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Shared memory mapped by these processes, which a kill -9 would leave for ever.

    Files are identified by inode: a semaphore is mapped under a name that it no longer has.
    """
    numbers: set[int] = set()
    for process in processes:
        with contextlib.suppress(OSError):  # gone, or not on Linux
            for line in Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(f"{watchdog.MEMORY}/"):
                    numbers.add(int(fields[4]))
    found: set[Path] = set()
    if numbers:
        for path in Path(watchdog.MEMORY).iterdir():
            with contextlib.suppress(OSError):
                if path.lstat().st_ino in numbers and watchdog.is_own_file(str(path)):
                    found.add(path)
    return found


def note_shared(folder: Path, paths: Iterable[Path]) -> None:
    """Have these files removed with the folder, by whichever process removes it."""
    with (folder / watchdog.SHARED).open("a") as file:
        file.writelines(f"{path}\n" for path in paths)


def _where() -> str:
    """This user on this machine, and its namespace of process numbers (containers differ)."""
    try:
        world = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # not on Linux
        world = 0
    return f"{host_name()}-{os.getuid()}-{world}"


@dataclass(eq=False)
class _RolloutServer(ServerProcess):
    """One of a trainer's servers."""

    config: RecipeConfig
    place: ServerResources
    weights: Path
    shared: set[Path] = field(default_factory=set)
    section: ClassVar[str] = "grpo.rollout_server"

    @property
    def settings(self) -> RolloutServerConfig:
        """See :class:`~infra.services.process.ServerProcess`."""
        return self.config.grpo.rollout_server

    def command(self) -> tuple[str, dict[str, str]]:
        """See :class:`~infra.services.process.ServerProcess`."""
        text = rollout_server_text(self.config, self.at, self.weights)
        return text, rollout_environment(self.place)

    def check(self) -> None:
        """See :class:`~infra.services.process.ServerProcess`; refuses a server without routes for
        new weights, or with routes open to others.

        Raises
        ------
        ConfigurationError
            It is such a server.
        """
        if ask_server(self.endpoint, "/../health", _PROBE_S)[0] != 200:
            raise NotReady
        if ask_server(Endpoint(self.at.url), "/../is_paused", _PROBE_S)[0] == 200:
            raise ConfigurationError(
                f"{self.name} lets everyone on this machine load weights into it.",
                expected="a server that asks for its key on every route",
                fix="remove the part of grpo.rollout_server.args that undoes `--middleware`",
            )
        if ask_server(self.endpoint, "/../is_paused", _PROBE_S)[0] != 200:
            raise ConfigurationError(
                f"{self.name} runs, but has no routes for new weights.",
                expected="vLLM 0.32 or later with VLLM_SERVER_DEV_MODE=1 in its environment",
                fix="let grpo.rollout_server.container pass the environment on (docker needs "
                "`-e VLLM_SERVER_DEV_MODE -e VLLM_API_KEY -e PYTHONPATH`), or use a newer vLLM",
            )

    def note_memory(self, folder: Path) -> None:
        """Record in ``folder`` the shared memory that the server does not free itself."""
        process = self.process
        if process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            new = shared_memory(psutil.Process(process.pid).children(recursive=True)) - self.shared
            self.shared |= new
            note_shared(folder, new)


@dataclass(eq=False)
class LocalRolloutServers:
    """A :class:`~refiner_core.contract.types.RolloutServers` on this node.

    Attributes
    ----------
    config
        Its ``grpo``, ``model`` and ``seed``.
    places
        One per server.
    memory
        A folder that is removed however this process ends
        (:func:`~infra.rollouts.servers.memory_folder`), and with it the servers' shared memory.
    host
        Address at which they listen.
    node
        Number of this node within the job.
    should_stop
        Whether this process was asked to end, during a wait for a server.
    tell
        Receives the seconds of waiting while servers start.
    """

    config: RecipeConfig
    places: Sequence[ServerResources]
    memory: Path
    host: str = LOOPBACK
    node: int = 0
    should_stop: Callable[[], bool] = lambda: False
    tell: Callable[[float], None] = lambda seconds: None

    def __post_init__(self) -> None:
        self._running: dict[int, _RolloutServer] = {}
        self._replaced = 0
        self._closing, self._telling = threading.Event(), threading.Lock()

    def start(self, weights: Path) -> list[Endpoint]:
        """Start all of them in parallel."""
        starts = [partial(self._start, index, weights) for index in range(len(self.places))]
        return all_started(starts, undo=partial(self._stop_all, 0.0))

    def replace(self, index: int, weights: Path, why: str) -> Endpoint:
        """End one at once and start another, within ``max_restarts`` in all.

        Raises
        ------
        KilledError
            The limit is reached.
        """
        most, server = self.config.grpo.rollout_server.max_restarts, self._running[index]
        self._replaced += 1
        if server.code is not None:
            why = f"{why} ({server.ended('while it served')})"
        self._end(server, 0.0)
        if self._replaced > most:
            raise KilledError(
                f"Rollout servers had to be replaced {self._replaced} times in this stage "
                f"(grpo.rollout_server.max_restarts={most}). The last one: {why}",
                expected="servers that keep running",
                fix="see their output in the stage's log; the same command resumes from the last "
                "checkpoint",
            )
        return self._start(index, weights)

    def weights_of(self, index: int, weights: Path) -> str:
        """The folder itself: they are on its node."""
        return str(weights)

    def close(self) -> None:
        """End all of them, even while another thread waits for one to start."""
        self._closing.set()
        self._stop_all(_GRACE_S)

    def _stop_all(self, grace_s: float) -> None:
        if self._running:
            with ThreadPoolExecutor(len(self._running)) as pool:
                list(pool.map(lambda one: self._end(one, grace_s), [*self._running.values()]))

    def _end(self, server: _RolloutServer, grace_s: float) -> None:
        """End one, and free the shared memory that it does not free itself."""
        server.note_memory(self.memory)
        server.stop(grace_s)
        kill_stale_processes(server.place.mark)  # its watchdog may have been killed with it
        for path in server.shared:
            path.unlink(missing_ok=True)
        server.shared.clear()

    def _start(self, index: int, weights: Path) -> Endpoint:
        """Start one and wait until it answers."""

        def tell(waited_s: float) -> None:
            with self._telling:
                self.tell(waited_s)

        number = index + self.node * len(self.places)
        many = len(self.places) > 1 or number > 0
        server = self._running[index] = _RolloutServer(
            *(self.config, self.places[index], weights),
            name=f"Rollout server {number}" if many else "The rollout server",
            key=self.places[index].key,
            host=self.host,
            prefix=f"[rollouts {number}] " if many else "[rollouts] ",
            should_stop=lambda: self.should_stop() or self._closing.is_set(),
            tell=tell,
        )
        server.start()
        server.note_memory(self.memory)
        return server.endpoint


def all_started(starts: Sequence[Callable[[], T]], *, undo: Callable[[], None]) -> list[T]:
    """Results of starts that run in parallel; after an error of one, all are undone."""
    with ThreadPoolExecutor(len(starts)) as pool:
        futures = [pool.submit(start) for start in starts]
        errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        undo()
        raise errors[0]
    return [future.result() for future in futures]


@contextmanager
def open_vllm(
    config: RecipeConfig,
    tokenizer: Any,
    workdir: Path,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    tell: Callable[[float], None] = lambda seconds: None,
    on_step: Callable[[int, int], None] | None = None,
    server_gpus: Sequence[Sequence[int]] | None = None,
) -> Iterator[VllmGenerator]:
    """Rollouts from ``grpo.vllm_num_engines`` servers of this node.

    Parameters
    ----------
    config
        The whole recipe.
    tokenizer
        The trainer's.
    workdir
        A folder of this stage; it marks the servers, and leftovers of an earlier attempt on this
        node are ended.
    should_stop, tell
        Whether to give up, and the seconds of waiting, while servers start. They are called from
        other threads, also during a call of the generator: no collective operations of ranks.
    on_step
        See :class:`~refiner_core.generation.vllm.client.VllmGenerator`.
    server_gpus
        GPUs of each server of this node, as numbers within the job's; by default those of
        :func:`~refiner_core.contract.placement.placement_of`.

    Raises
    ------
    ConfigurationError
        ``grpo.rollout_server.weights_dir`` is not usable.
    """
    gpus = placement_of(config, "grpo").server_gpus if server_gpus is None else server_gpus
    opened = local_servers(config, workdir, gpus, should_stop=should_stop, tell=tell)
    with opened as servers:
        yield vllm_generator(config, servers, servers.memory, tokenizer, on_step)


@contextmanager
def local_servers(
    config: RecipeConfig,
    workdir: Path,
    gpus: Sequence[Sequence[int]],
    *,
    should_stop: Callable[[], bool] = lambda: False,
    tell: Callable[[float], None] = lambda seconds: None,
    host: str = LOOPBACK,
    node: int = 0,
) -> Iterator[LocalRolloutServers]:
    """This node's servers, none of them started yet, and their folder in memory; the block's end
    ends them. ``gpus`` are those of each, other parameters as of :func:`open_vllm` and
    :class:`LocalRolloutServers`."""
    kill_stale_processes(workdir / MARK_NAME)
    with memory_folder(Path(config.grpo.rollout_server.weights_dir)) as folder:
        shutil.copytree(Path(extension.__file__).parent, folder / "extension")
        key = secrets.token_urlsafe(32)
        places = [
            ServerResources(
                gpus=visible(numbers) if numbers else "",
                extension=folder / "extension",
                mark=workdir / MARK_NAME / f"{node}-{index}",
                key=key,
            )
            for index, numbers in enumerate(gpus)
        ]
        servers = LocalRolloutServers(
            *(config, places, folder, host, node), should_stop=should_stop, tell=tell
        )
        try:
            yield servers
        finally:
            servers.close()


def vllm_generator(
    config: RecipeConfig,
    servers: RolloutServers,
    folder: Path,
    tokenizer: Any,
    on_step: Callable[[int, int], None] | None = None,
) -> VllmGenerator:
    """A generator over servers; ``folder`` is this node's, in memory."""
    grpo, server = config.grpo, config.grpo.rollout_server
    weights = WeightSync(
        servers,
        folder,
        tokenizer,
        tolerance=tolerance_of(server.canary_tolerance, config.model.dtype),
        window=grpo.max_token_length,
        timeout_s=server.start_timeout_s,
    )
    return VllmGenerator(
        weights,
        window=grpo.max_token_length,
        in_flight=2 * grpo.generation_batch_size,
        silence_s=server.request_timeout_s,
        on_step=on_step,
    )


@contextmanager
def open_sampler(
    config: RecipeConfig,
    stage: str,
    model_ref: str,
    tokenizer: Any,
    workdir: Path,
    *,
    window: int,
    should_stop: Callable[[], bool] = lambda: False,
    tell: Callable[[float], None] = lambda seconds: None,
    on_step: Callable[[int, int], None] | None = None,
) -> Iterator[VllmGenerator]:
    """Servers for a stage ``sample`` or ``evaluate``: a fixed model, no training, and all GPUs of
    the stage's resources for the servers.

    They are started on a copy of the model in memory, and verified by a canary that this process
    scores on the CPU. ``window`` is the largest number of tokens of a prompt and its answer. See
    :func:`open_vllm` for the rest.
    """
    view = sampling_view(config, stage, window)
    with open_vllm(
        *(view, tokenizer, workdir),
        should_stop=should_stop,
        tell=tell,
        on_step=on_step,
        server_gpus=sampling_servers(config, stage),
    ) as rollouts:
        rollouts.sync(hand_over_of(partial(_loaded, view.model, model_ref)), "sampled")
        yield rollouts


def sampling_view(config: RecipeConfig, stage: str, window: int) -> RecipeConfig:
    """The recipe for rollout servers of a stage ``sample`` or ``evaluate``: this process scores the
    canary on a CPU, whatever kernel training uses."""
    section = sampling_section(config, stage)
    batch = (
        section.batch_size if isinstance(section, EvaluateConfig) else section.generation_batch_size
    )
    grpo = replace(
        config.grpo,
        generation_backend="vllm",
        generation_batch_size=batch,
        max_token_length=window,
        resources=section.resources,
    )
    return replace(config, grpo=grpo, model=replace(config.model, attn_implementation="sdpa"))


def _loaded(model: ModelConfig, model_ref: str) -> Any:
    from refiner_core.generation.load import load_model, set_threads

    set_threads(model)
    return load_model(model_ref, model)
