"""The ranks of a stage, as its worker sees them, and what they do when the stage stands still.

In: the counts that every rank sends every few seconds, and stacks. Out: :class:`RankWatch`: all
counts as one value (a change is a sign of life), and the state of every rank, from which
:func:`infra.attempt.stalls.find_laggard` names the cause. A stage without ranks of its own trains
in this process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from infra.attempt.stalls import SILENT_S, RankState
from infra.host.processes import host_name
from infra.process.stacks import in_collective, main_frames, place_of, stacks_of
from infra.store import atomic
from refiner_core.training.pulse import PULSE

#: File of an attempt with the stacks of all ranks.
STACKS = "stacks.txt"
#: How long stacks of other nodes, and the ranks' counts of NCCL, are awaited, seconds.
_WAIT_S = 6.0
#: Less than this between two looks is no work on files, bytes.
_IDLE_BYTES = 1 << 20
#: What a rank sends of its position.
_COUNTS = ("step", "phase", "visits", "calls", "inside", "recent")


class RankWatch:
    """Counts of all ranks, and their stacks on demand.

    Attributes
    ----------
    ask_elsewhere
        Has the other nodes collect the stacks of their ranks' processes; None without other nodes.
    """

    def __init__(self) -> None:
        self._beats: dict[int, tuple[Mapping[str, Any], float]] = {}
        self._stacks: dict[int, str] = {}
        self._moved_bytes: int | None = None
        self.ask_elsewhere: Callable[[Mapping[int, int]], None] | None = None

    def start(self) -> None:
        """Forget earlier ranks."""
        self._beats.clear()

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event of a rank: its counts (``beat``), or its ``stacks``."""
        if event["event"] == "stacks":
            self._stacks[int(event["rank"])] = str(event["text"])
        else:
            self._beats[int(event["rank"])] = (event, time.monotonic())

    def counts(self) -> object:
        """A value that changes with every sign of life."""
        if not self._beats:
            return PULSE.moved, PULSE.calls, PULSE.step, PULSE.phase
        names = ("moved", "calls", "step", "phase")
        return tuple((r, *(b[n] for n in names)) for r, (b, _) in sorted(self._beats.items()))

    def works_on_files(self) -> bool:
        """Tell whether this node's processes have read or written since the last call: loading a
        large model is silent and no stall."""
        total = 0
        top = psutil.Process()
        for process in [top, *top.children(recursive=True)]:
            with suppress(psutil.Error, AttributeError):
                io = process.io_counters()
                total += max(io.read_chars, io.read_bytes) + max(io.write_chars, io.write_bytes)
        before, self._moved_bytes = self._moved_bytes, total
        return before is None or total - before > _IDLE_BYTES

    def states(self, folder: Path) -> list[RankState]:
        """What every rank does; writes the stacks of all to ``folder``."""
        here = host_name()
        beats = dict(self._beats) or {0: (self._own(), time.monotonic())}
        seen_at = time.monotonic()
        mine = {rank: int(b["pid"]) for rank, (b, _) in beats.items() if b["host"] == here}
        away = {rank: int(b["pid"]) for rank, (b, _) in beats.items() if rank not in mine}
        if away and self.ask_elsewhere is not None:
            self.ask_elsewhere(away)
        found = stacks_of([*mine.values(), os.getpid()])
        self._stacks |= {rank: found[pid] for rank, pid in mine.items() if pid in found}
        self._await(set(away), beats)
        texts = [f"=== rank {rank}\n{text}" for rank, text in sorted(self._stacks.items())]
        if os.getpid() not in mine.values():
            texts.append(f"=== worker\n{found.get(os.getpid(), '')}")
        with suppress(OSError):  # the verdict matters more
            atomic.write_text(folder / STACKS, "\n".join(texts))
        latest = {rank: self._beats.get(rank, beat)[0] for rank, beat in beats.items()}
        return [
            self._state(rank, latest[rank], seen_at - at, mine.get(rank))
            for rank, (_, at) in sorted(beats.items())
        ]

    def node_of(self, rank: int | None) -> str:
        """Node of a rank, by its name in Slurm; None: of the ranks that stopped sending well before
        others did. Empty if unknown."""
        if rank is None and self._beats:
            at = {r: sent for r, (_, sent) in self._beats.items()}
            first = min(at, key=at.__getitem__)
            rank = first if max(at.values()) - at[first] > SILENT_S else None
        return "" if rank not in self._beats else str(self._beats[rank][0].get("node", ""))

    def _await(self, away: set[int], beats: Mapping[int, tuple[Any, float]]) -> None:
        """Wait a while for answers from elsewhere, and for the next counts of each rank, which
        have NCCL's once stacks were asked for."""
        deadline = time.monotonic() + _WAIT_S
        nccl = any("nccl" in beat for beat, _ in beats.values())
        while time.monotonic() < deadline:
            newer = all(self._beats[rank][1] > at for rank, (_, at) in beats.items() if nccl)
            if newer and away <= self._stacks.keys():
                return
            time.sleep(0.1)

    def _own(self) -> Mapping[str, Any]:
        return {**PULSE.to_json(), "host": host_name(), "pid": os.getpid()}

    def _state(
        self, rank: int, beat: Mapping[str, Any], silent_s: float, pid: int | None
    ) -> RankState:
        stacks = self._stacks.get(rank)
        nccl = beat.get("nccl") or {}
        disk = False
        with suppress(psutil.Error):
            disk = pid is not None and psutil.Process(pid).status() == psutil.STATUS_DISK_SLEEP
        return RankState(
            rank=rank,
            host=str(beat["host"]),
            **{name: beat[name] for name in _COUNTS},
            frames=[] if stacks is None else main_frames(stacks)[::-1],
            silent_s=silent_s,
            here=pid is not None,
            in_collective=None if stacks is None else in_collective(stacks),
            place="" if stacks is None else place_of(stacks),
            enqueued=int(nccl.get("enqueued") or 0),
            kernel=str(nccl.get("name") or ""),
            on_disk=disk,
        )
