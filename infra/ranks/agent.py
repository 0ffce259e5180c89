"""torchrun's agent on one node: ``python -P -m infra.ranks.agent TORCHRUN-ARGUMENTS``.

In: what the command ``torchrun`` takes. Out: this node's ranks, what they print with ``[rank N]``
before it (rank 0's as it is), and as the last event which of them ended and how; the exit code is 0
where all did well.

It differs from the command in four things. Ranks of one node meet without a server. Requests to
stop are not passed on: the scheduler sends them to every process, and ranks end when rank 0 says
so, after they have saved. What ranks print goes through pipes of this process, not through files,
so that it is whole after a crash and takes no room. And the failures are told as values, not as a
banner.
"""

from __future__ import annotations

import inspect
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from infra.jobs.signals import STOP_SIGNALS
from infra.process.minder import die_with_parent
from infra.ranks.protocol import MARK, tell
from refiner_core.training.ranks import STORE

_LAST_WORDS_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Run this node's ranks to their end."""
    from torch.distributed.elastic.multiprocessing import errors
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    die_with_parent()
    ignore_stop_signals()
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    args = parse_args([*argv])
    if args.standalone:
        args.rdzv_backend, args.rdzv_endpoint = _meet_on_this_node(), "127.0.0.1:0"
    config, command, rest = config_from_args(args)
    _limit_patience(args.shutdown_timeout)
    output = _Output()
    config.logs_specs = _log_specs(output)
    failures: dict[str, Any] = {}
    try:
        elastic_launch(config, command)(*rest)
    except errors.ChildFailedError as failed:
        first = min((f.timestamp for f in failed.failures.values()), default=0)
        failures = {
            str(rank): {"code": f.exitcode, "pid": f.pid, "late_s": f.timestamp - first}
            for rank, f in failed.failures.items()
        }
    finally:
        output.close()
    tell({"event": "ended", "node": args.node_rank, "failures": failures})
    return 1 if failures else 0


def _meet_on_this_node() -> str:
    """Let nobody listen for the ranks of one node; returns the name of the way they meet.

    torchrun's own way is a server without a key, on all interfaces, with pickles in it. One agent
    needs none, and its ranks find each other in a file without a name, which the system opens for
    nobody but this user, and which is gone with this process.
    """
    from torch.distributed import HashStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousInfo,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class OneNode(StaticTCPRendezvous):  # type: ignore[misc, unused-ignore]
        """A static rendezvous with nobody else."""

        def get_backend(self) -> str:
            return "one-node"

        def next_rendezvous(self) -> RendezvousInfo:
            # The address is for what reads torchrun's settings; nobody is there.
            return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    rendezvous_handler_registry.register(
        "one-node", lambda params: OneNode("", 0, 0, 1, params.run_id, 0)
    )
    number = os.memfd_create("refiner-ranks")
    os.environ[STORE] = f"file:///proc/{os.getpid()}/fd/{number}"
    return "one-node"


def _limit_patience(seconds: int) -> None:
    """Give ranks as long to end as was asked for: torchrun has 30 s in one of the places where it
    waits for them, and ours do not end on its signal."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    last = list(inspect.signature(PContext.close).parameters.values())[-1]
    if last.name == "timeout" and PContext.close.__defaults__:
        PContext.close.__defaults__ = (*PContext.close.__defaults__[:-1], seconds)


def ignore_stop_signals() -> None:
    """Do nothing on requests to stop: by a handler, since SIG_IGN would be inherited."""
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)


class _Output:
    """Pipes that ranks print into, and threads that pass it on: whole lines, but empty ones."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock, self._over = threading.Lock(), threading.Event()

    def path_for(self, rank: int) -> str:
        """A file name of this process that stands for the pipe of a rank."""
        reading, writing = os.pipe()
        prefix = b"" if rank == 0 else b"[rank %d] " % rank
        thread = threading.Thread(target=self._pass_on, args=(reading, prefix), daemon=True)
        self._threads.append(thread)
        thread.start()
        return f"/proc/self/fd/{writing}"

    def close(self) -> None:
        """Pass on what is left. The pipes stay open: a rank may have left something running."""
        self._over.set()
        for thread in self._threads:
            thread.join(_LAST_WORDS_S)

    def _pass_on(self, reading: int, prefix: bytes) -> None:
        rest = b""
        while True:
            over = self._over.is_set()  # asked before: what came until then is read
            if not select.select([reading], [], [], 0.1)[0]:
                if over:
                    break
                continue
            *lines, rest = (rest + os.read(reading, 1 << 16)).split(b"\n")
            if len(rest) > 1 << 16:
                lines, rest = [*lines, rest], b""
            self._write(lines, prefix)
        self._write([rest], prefix)

    def _write(self, lines: Sequence[bytes], prefix: bytes) -> None:
        mark = os.environ.get(MARK, "\n").encode()
        kept = (line if line.startswith(mark) else prefix + line for line in lines if line.strip())
        data = b"".join(line + b"\n" for line in kept)
        with self._lock:
            while data:
                data = data[os.write(1, data) :]


def _log_specs(output: _Output) -> Any:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class PipedLogs(LogsSpecs):  # type: ignore[misc, no-any-unimported, unused-ignore]
        """Both streams of a rank into its pipe."""

        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            paths = {local: output.path_for(int(env["RANK"])) for local, env in envs.items()}
            nothing = dict.fromkeys(envs, os.devnull)
            return LogsDest(stdouts=paths, stderrs=paths, error_files=nothing)

        @property
        def root_log_dir(self) -> str:
            return os.devnull

    return PipedLogs()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
