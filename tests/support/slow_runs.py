"""Healthy runs that are slow in every way that a cluster knows, in virtual time.

In: a seed. Out: whether the clock of an attempt would have ended the run. The decision is the real
one (:class:`infra.attempt.stalls.StallClock`); the lengths of phases are made: a length per run and
phase between 0.1 s and 10 minutes, spread by a factor of about 1.5 from step to step, answers that
grow up to threefold in the course of the run, a first step that compiles, saves that take up to
three times longer, a slower node, heartbeats that come late, and suspensions of up to an hour.
Loading and saving read and write all the time, as they do.
"""

from __future__ import annotations

import math
from random import Random

from infra.attempt.stalls import PhaseTimes, StallClock, merged
from refiner_core.contract.types import Progress

CAP_S, FLOOR_S = 7200.0, 20.0
PHASES = ("generate", "judge", "update", "validate", "save")
_BEAT_S = 2.0


class _Run:
    def __init__(self, random: Random, earlier: dict[str, PhaseTimes]) -> None:
        self.random, self.now, self.beat_at, self.killed = random, 0.0, 0.0, ""
        self.clock = StallClock(0.0, CAP_S, FLOOR_S)
        self.clock.learn(earlier)
        self.parts: dict[str, int] = {}

    def report(self, step: int, steps: int, phase: str, part: float = 0.0) -> None:
        self.clock.report(1, Progress(step, steps, phase, {"part": part}), self.now)

    def work(self, seconds: float) -> None:
        """Nothing is reported for so long; the heartbeat goes on."""
        end = self.now + seconds
        while self.now < end and not self.killed:
            late = self.random.choice([0.0] * 30 + [1.0, 4.0, 30.0])
            self.now = min(end, self.now + _BEAT_S + late)
            if self.random.random() < 0.0005:  # suspended by the scheduler
                pause = self.random.uniform(60.0, 3600.0)
                self.now, end = self.now + pause, end + pause
            self.clock.beat(self.now)
            stall = self.clock.stall(self.now)
            files = stall is not None and stall.phase in ("loading", "save")
            if stall is not None and not self.clock.is_excused(stall, works_on_files=files):
                self.killed = f"{stall}"


def _lengths(random: Random) -> dict[str, float]:
    return {p: 10 ** random.uniform(-1.0, math.log10(600.0)) for p in (*PHASES, "loading")}


def _train(run: _Run, random: Random, lengths: dict[str, float], slow: float) -> None:
    steps = random.randrange(8, 40)
    run.report(0, 0, "loading")
    run.work(lengths["loading"] * slow * random.uniform(0.7, 2.5))
    grows = random.uniform(1.0, 3.0)
    parts = {p: 1 if p == "save" else random.choice([1, 4, 20]) for p in PHASES}
    for step in range(steps):
        for phase in PHASES:
            every = {"validate": 4, "save": 5}.get(phase, 1)
            if step % every:
                continue
            length = lengths[phase] * slow * random.lognormvariate(0.0, 0.25)
            length *= 1 + (grows - 1) * step / steps if phase in ("generate", "update") else 1.0
            length *= random.uniform(1.5, 4.0) if step == 0 else 1.0
            length *= random.choice([1.0, 1.0, 1.0, 3.0]) if phase == "save" else 1.0
            count = max(1, round(parts[phase] * random.uniform(0.5, 1.5)))
            for part in range(count):
                run.report(step, steps, phase, part)
                run.work(length / count)
        if run.killed:
            return


def killed_healthy_run(random: Random) -> str:
    """Why a healthy run would have been ended; empty if it would not."""
    lengths = _lengths(random)
    earlier: dict[str, PhaseTimes] = {}
    for attempt in range(random.randrange(1, 4)):  # the last one may be on a slower node
        run = _Run(random, earlier)
        _train(run, random, lengths, random.uniform(1.0, 2.0) if attempt else 1.0)
        if run.killed:
            return run.killed
        earlier = merged([earlier, run.clock.times])
    return ""
