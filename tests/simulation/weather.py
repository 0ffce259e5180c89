"""Which faults a schedule has, and how often: drawn from its seed.

In: a random generator. Out: a :class:`Weather`. Each schedule has some of the faults only, so that
rare meetings of two of them come up, too. :meth:`Weather.clear_up` ends them all.
"""

import random
from dataclasses import dataclass, field

#: What may befall a running job.
FAULTS = (
    "preempt",  # SIGTERM, a grace, SIGKILL; requeued under the same id, or not
    "preempt silently",  # SIGKILL at once
    "node fails",  # and perhaps the process goes on for a while where nobody sees it
    "time limit",  # an early signal, then SIGKILL; never requeued
    "out of memory",
    "crash",  # the process is gone without a word
    "bug",  # an exception that no rule knows
    "gpu error",
    "judge outage",
    "not finite",
    "hang",  # the process stands still, heartbeat and all
    "no progress",  # the heart beats, and nothing else happens
    "suspend",
    "scancel",  # by a person: SIGTERM, then SIGKILL
    "requeue overlaps",  # the old copy is still there when the new one starts
)


@dataclass
class Weather:
    """How likely things are. Times in seconds, the rest are probabilities.

    Attributes
    ----------
    fault_mean_s
        Mean time to a fault of a running job; ``faults`` are those that come, with weights.
    requeue
        That Slurm starts a preempted job, or one of a failed node, again.
    held
        That a start fails, and the job is held.
    sbatch_fails, reply_lost
        That a submission fails; that it is then accepted all the same.
    accounting_lag_s
        How long a job that has ended is in no list.
    outage_mean_s
        Mean time between outages of the controller; 0: none.
    orchestrator_dies
        That an orchestrator is killed at some point.
    second_call
        That somebody else runs the same command, too.
    """

    fault_mean_s: float = 0.0
    faults: dict[str, float] = field(default_factory=dict)
    requeue: float = 0.0
    held: float = 0.0
    sbatch_fails: float = 0.0
    reply_lost: float = 0.0
    accounting_lag_s: float = 5.0
    outage_mean_s: float = 0.0
    outage_s: float = 300.0
    bad_nodes: int = 0
    orchestrator_dies: float = 0.0
    worker_dies: float = 0.0
    second_call: bool = False
    interrupts: float = 0.0
    disk_fills: float = 0.0
    small_files_too: bool = False
    long_stalls: float = 0.0
    clear: bool = False

    def clear_up(self) -> None:
        """No more faults; what is broken for good stays broken."""
        keep = {"bad_nodes": self.bad_nodes, "accounting_lag_s": self.accounting_lag_s}
        self.__dict__.update(Weather(**keep, clear=True).__dict__)


def draw_weather(rng: random.Random) -> Weather:
    """The weather of one schedule."""

    def some(value: float, probability: float = 0.5) -> float:
        return value * rng.random() if rng.random() < probability else 0.0

    chosen = rng.sample(FAULTS, rng.randint(1, len(FAULTS)))
    return Weather(
        fault_mean_s=rng.choice([300.0, 900.0, 2500.0]),
        faults={name: rng.random() + 0.1 for name in chosen},
        requeue=rng.choice([0.0, 0.5, 1.0]),
        held=some(0.3),
        sbatch_fails=some(0.3),
        reply_lost=rng.random(),
        accounting_lag_s=rng.choice([0.0, 2.0, 45.0]),
        outage_mean_s=rng.choice([0.0, 0.0, 2500.0, 8000.0]),
        outage_s=rng.choice([60.0, 600.0, 3000.0]),
        bad_nodes=rng.choice([0, 0, 1]),
        orchestrator_dies=some(1.0, 0.7),
        worker_dies=some(0.5),
        second_call=rng.random() < 0.3,
        interrupts=some(0.3),
        disk_fills=some(1.0),
        small_files_too=rng.random() < 0.3,
        long_stalls=some(0.004, 0.3),
    )
