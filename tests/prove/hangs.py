"""Faults of real ranks, and slow but healthy runs: is the cause named, and nobody killed?

    make prove                                       # among other proofs
    python -m tests.prove.hangs --faults 20 --runs 20

A hundred seeded faults, each in an attempt of two processes on gloo, in each phase: a rank sleeps,
loops, leaves a collective out, is killed, exits, runs out of memory, or loses its disk (EIO,
ENOSPC).
The recorded outcome must name the rank and the class, within three times the usual length of the
phase and 30 s. Then 200 slow but healthy runs in virtual time (:mod:`tests.support.slow_runs`), of
which none may be ended. Prints a table; exit code 1 if less than 95 % are named, or any is late or
killed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from random import Random

from tests.support.hangs import CLASSES, FaultLab, FaultVerdict, PlannedFault
from tests.support.slow_runs import killed_healthy_run

PHASES = ("loading", "generate", "judge", "update", "validate", "save")


def faults(number: int, seed: int) -> list[PlannedFault]:
    """Every kind in every phase in turn; rank and step are drawn."""
    random = Random(seed)
    pairs = [(kind, phase) for phase in PHASES for kind in CLASSES]
    pairs = [(k, p) for k, p in pairs if (k, p) != ("skip", "loading")]  # there is no collective
    random.shuffle(pairs)
    drawn = (pairs[i % len(pairs)] for i in count())
    return [
        PlannedFault(kind, phase, random.randrange(2), random.randrange(2, 5))
        for (kind, phase), _ in zip(drawn, range(number), strict=False)
    ]


def table(found: Sequence[FaultVerdict]) -> str:
    """A row per kind of fault."""
    rows = ["| fault | class | faults | rank and class named | in time | slowest |"]
    rows.append("|---|---|---|---|---|---|")
    for kind, expected in CLASSES.items():
        mine = [v for v in found if v.fault.kind == kind]
        if mine:
            numbers = (len(mine), sum(v.named for v in mine), sum(v.in_time for v in mine))
            slowest = max(v.seconds for v in mine)
            cells = " | ".join(map(str, numbers))
            rows.append(f"| {kind} | `{expected}` | {cells} | {slowest:.0f} s |")
    return "\n".join(rows)


def main() -> int:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside", type=int, default=2, help="faults at a time")
    args = parser.parse_args()
    planned = faults(args.faults, args.seed)
    found: list[FaultVerdict] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.beside) as pool:
        lab = FaultLab(Path(folder))
        for verdict in pool.map(lambda f: lab.run(f[1], str(f[0])), enumerate(planned)):
            found.append(verdict)
            if not (verdict.named and verdict.in_time):
                print(f"{verdict.fault}: {verdict.seconds:.1f} s, {verdict.outcome}", flush=True)
            if len(found) % 10 == 0:
                print(f"{len(found)} of {len(planned)}", file=sys.stderr, flush=True)
    killed = [why for seed in range(args.runs) if (why := killed_healthy_run(Random(seed)))]
    print(table(found))
    named, late = sum(v.named for v in found), sum(not v.in_time for v in found)
    print(f"\n{named} of {len(found)} named, {late} late")
    print(f"{len(killed)} of {args.runs} healthy runs ended")
    return int(named < 0.95 * len(found) or late > 0 or bool(killed))


if __name__ == "__main__":
    sys.exit(main())
