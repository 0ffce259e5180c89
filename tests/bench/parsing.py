"""`python -m tests.bench parsing`: reading of 10 MB that somebody made to be slow to read.

Prints one JSON line per kind of text: ``name``, seconds of CPU for answer and prompt at 2.5 and at
10 MB, their ``ratio`` (4 is linear, 16 quadratic), MB per second, and one line for tag scanning
against the pattern that one would write first, which is quadratic (measured on less).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

from refiner_core.answers import parse_answer, parse_evidence

MEGABYTE = 1_000_000
UNITS = {
    "unclosed claims": "<snippet id=a>",
    "unclosed answers": "<answer>",
    "less-than signs": "<",
    "broken closing tags": "</snippet",
    "stray closing tags": "</snippet>",
    "open quotes": '<snippet id="a',
    "open quotes in tags": "<snippet id='a>",
    "tool outputs": "<tool_output>",
    "unclosed web pages": "<webpage id=a>x",
    "ids without end": "id=a,",
}
_TOO_SHORT = 0.2  # seconds of CPU; below, memory and clock say more than the work
#: One match per opening tag looks for an end that is not there: quadratic.
_FIRST_IDEA = re.compile(r"<snippet id=\"?([^\">]+)\"?>(.*?)</snippet>", re.DOTALL)


def main(arguments: list[str]) -> int:
    """Measure each kind; exits with 1 where one is not linear."""
    del arguments
    linear = True
    for name, unit in UNITS.items():
        line = measure(name, unit)
        linear = linear and (float(line["ratio"]) < 8 or float(line["seconds_10_mb"]) < _TOO_SHORT)
        print(json.dumps(line), flush=True)
    print(json.dumps(against_the_first_idea()), flush=True)
    return 0 if linear else 1


def measure(name: str, unit: str) -> dict[str, float | str]:
    """CPU seconds of both readers on one kind of text, the better of two rounds."""

    def read(size: float) -> None:
        filler = unit * int(size // len(unit))
        parse_answer(f"<answer>{filler}</answer>", {"a"})
        parse_evidence(f"<tool_output>{filler}")

    small = best_of(2, lambda: read(2.5 * MEGABYTE))
    large = best_of(2, lambda: read(10 * MEGABYTE))
    return {
        "name": f"reading 10 MB of {name}",
        "seconds_2.5_mb": round(small, 3),
        "seconds_10_mb": round(large, 3),
        "ratio": round(large / small, 2),
        "mb_per_s": round(20 / large, 1),  # read twice: as an answer and as a prompt
    }


def against_the_first_idea() -> dict[str, float | str]:
    """50 kB of unclosed claims, ours against the pattern."""
    text = "<snippet id=a>" * (50_000 // 14)
    ours = best_of(3, lambda: parse_answer(f"<answer>{text}</answer>", {"a"}))
    rival = best_of(3, lambda: _FIRST_IDEA.findall(text))
    return {
        "name": "reading 50 kB of unclosed claims",
        "ours_s": round(ours, 4),
        "rival_s": round(rival, 4),
        "ratio": round(rival / ours, 1),
    }


def best_of(rounds: int, work: Callable[[], object]) -> float:
    """CPU seconds of the fastest round."""
    times = []
    for _ in range(rounds):
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return min(times)
