"""Agent of one node: ``python -P -m infra.ranks.agent NODE MODULE ARGUMENTS``.

In: the order of its ranks (their number, and where they meet). Out: this node's ranks, their output
with a prefix ``[rank N]`` (rank 0's without), and as the last event the ranks that failed and how;
the exit code is 0 if none did. Each rank gets torchrun's variables (``RANK``, ``WORLD_SIZE``,
``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``).

torchrun itself is not used. Its ranks of one node meet on a server without a key, on all
interfaces, with pickles in it; ours find each other in a file without a name, which the system
opens for this user alone, and which is gone with this process. torchrun passes on requests to stop;
the scheduler sends them to every process anyway, and ranks end on rank 0's request, after they have
saved. And the output of ranks is complete after a crash and takes no disk space, since it goes
through pipes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from infra.host.processes import environment
from infra.jobs.signals import STOP_SIGNALS
from infra.process.watchdog import die_with_parent
from infra.ranks.messages import MARK, ORDER, tell
from refiner_core.training.ranks import STORE

_POLL_S = 0.1
_LAST_WORDS_S = 5.0
#: A line without an end is cut after this many bytes; an event is shorter.
_LINE_LIMIT = 1 << 16


def main(argv: Sequence[str]) -> int:
    """Run this node's ranks until they end."""
    die_with_parent()
    ignore_stop_signals()
    node, (module, *rest) = int(argv[0]), argv[1:]
    order = json.loads(os.environ[ORDER])
    count, nodes = order["placement"]["nproc_per_node"], order["placement"]["nodes"]
    lock, readers = threading.Lock(), []
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    settings = {**environment(), **_meeting(order["meet"]), "WORLD_SIZE": str(count * nodes)}
    if count > 1:
        settings.setdefault("OMP_NUM_THREADS", "1")
    for local in range(count):
        rank = node * count + local
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", module, *rest],
            env={**settings, "RANK": str(rank), "LOCAL_RANK": str(local)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ranks[rank] = process
        prefix = b"" if rank == 0 else b"[rank %d] " % rank
        reader = threading.Thread(target=_pass_on, args=(process.stdout, prefix, lock), daemon=True)
        readers.append(reader)
        reader.start()
    failures = _until_end(ranks, order["patience_s"])
    until = time.monotonic() + _LAST_WORDS_S  # a rank may have left children running
    for reader in readers:
        reader.join(max(0.0, until - time.monotonic()))
    with lock:
        tell({"event": "ended", "node": node, "failures": failures})
    return 1 if failures else 0


def _meeting(meet: str) -> dict[str, str]:
    """Settings by which ranks find each other."""
    if meet:
        address, _, port = meet.rpartition(":")
        return {"MASTER_ADDR": address, "MASTER_PORT": port}
    number = os.memfd_create("refiner-ranks")
    store = f"file:///proc/{os.getpid()}/fd/{number}"
    # The address only satisfies readers of torchrun's settings; nothing listens there.
    return {STORE: store, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _until_end(ranks: dict[int, subprocess.Popen[bytes]], patience_s: float) -> dict[str, Any]:
    """Wait for all; kill those that remain some time after a first failure. Returns the failures in
    order, without those killed here."""
    failures: dict[str, Any] = {}
    left, first = dict(ranks), float("inf")
    while left and (now := time.monotonic()) < first + patience_s:
        for rank, process in list(left.items()):
            if (code := process.poll()) is None:
                continue
            del left[rank]
            if code:
                first = min(first, now)
                failures[str(rank)] = {"code": code, "pid": process.pid, "late_s": now - first}
        time.sleep(_POLL_S)
    for process in left.values():
        process.kill()
        process.wait()
    return failures


def ignore_stop_signals() -> None:
    """Do nothing on requests to stop: by a handler, since SIG_IGN would be inherited."""
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)


def _pass_on(output: IO[bytes], prefix: bytes, lock: threading.Lock) -> None:
    """Pass on whole lines, except empty ones."""
    mark = os.environ.get(MARK, "\n").encode()
    while line := output.readline(_LINE_LIMIT):
        if line.strip():
            whole = line if line.startswith(mark) else prefix + line
            with lock:
                sys.stdout.buffer.write(whole.rstrip(b"\n") + b"\n")
                sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
