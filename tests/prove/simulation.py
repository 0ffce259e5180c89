"""Ten thousand campaigns in virtual time, each under faults of its own.

    make prove                                              # seeds 1 to 10,000
    python -m tests.prove.simulation --seeds 500
    python -m tests.prove.simulation --seed 17 --verbose    # one of them, event by event

What must hold, and what may happen, is in `tests/simulation`. Ends with exit code 1 if a schedule
breaks a rule, and prints how to see it again; with the mutations (`--mutations`), deliberate bugs
that some schedule has to notice, if one goes unnoticed.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence

from tests.simulation.campaigns import Summary, run_schedule
from tests.simulation.mutations import MUTATIONS, first_noticed
from tests.simulation.world import Violation


def main(argv: Sequence[str] | None = None) -> int:
    """Run the schedules; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10_000, help="how many, from 1 up")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--verbose", action="store_true", help="with its events (with --seed)")
    parser.add_argument("--mutations", action="store_true", help="also the deliberate bugs")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    if args.seed is not None:
        return _one(args.seed, args.verbose)
    failures = _many(args.seeds, args.processes)
    missed = _mutations(args.seeds) if args.mutations else 0
    return 1 if failures or missed else 0


def _one(seed: int, verbose: bool) -> int:
    try:
        print(run_schedule(seed, print if verbose else None))
    except Violation as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _many(seeds: int, processes: int) -> int:
    began, failures, done = time.monotonic(), 0, list[Summary]()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for result in pool.imap_unordered(try_seed, range(1, seeds + 1), chunksize=20):
            if isinstance(result, str):
                failures += 1
                print(result, flush=True)
            else:
                done.append(result)
            count = failures + len(done)
            if count % 1000 == 0:
                print(f"{count} schedules, {time.monotonic() - began:.0f} s", flush=True)
    attempts, setbacks = sum(s.attempts for s in done), sum(s.setbacks for s in done)
    days = sum(s.virtual_s for s in done) / 86400
    print(
        f"{seeds} schedules, {failures} broke a rule: {attempts} attempts, {setbacks} setbacks, "
        f"{sum(s.calls for s in done)} calls ({sum(s.killed for s in done)} killed), "
        f"{days:.0f} virtual days in {time.monotonic() - began:.0f} s"
    )
    return failures


def try_seed(seed: int) -> Summary | str:
    """What a schedule was like, or which rule it broke."""
    try:
        return run_schedule(seed)
    except Violation as error:
        return str(error)


def _mutations(seeds: int) -> int:
    missed = 0
    for name in MUTATIONS:
        found = first_noticed(name, range(1, seeds + 1))
        missed += found is None
        print(f"{name}: {'NOT noticed' if found is None else found}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
