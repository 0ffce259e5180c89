"""What the reconciler may decide about a stage: values, which others carry out and show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from refiner_core.contract.plan import PlannedStage
from refiner_core.contract.records import Outcome
from refiner_core.contract.views import ViewState


@dataclass(frozen=True)
class Done:
    """The stage has its result."""

    stage: PlannedStage


@dataclass(frozen=True)
class Launch:
    """Claim the attempt after ``after`` and submit it."""

    stage: PlannedStage
    after: int


@dataclass(frozen=True)
class Wait:
    """For an attempt that runs (``attempt`` > 0) or queues, for inputs, or for a free slot.

    ``unseen``: nobody can say just now how the attempt is; ``short``: its worker waits for room.
    """

    stage: PlannedStage
    reason: str
    attempt: int = 0
    queued: bool = False
    unseen: bool = False
    short: bool = False


@dataclass(frozen=True)
class Serve(Wait):
    """A service that lives, or may do so: ``ready`` if it answers, ``wanted`` if a stage of this
    call needs it now."""

    ready: bool = False
    wanted: bool = False


@dataclass(frozen=True)
class Rest:
    """Nobody in this call needs the service any more; ``live``: it still runs, and ends by itself
    when nobody else needs it either."""

    stage: PlannedStage
    live: bool


@dataclass(frozen=True)
class CloseAttempt:
    """Write the outcome of an attempt that ended without one; a hung one is killed first."""

    stage: PlannedStage
    attempt: int
    outcome: Outcome


@dataclass(frozen=True)
class Release:
    """Let an attempt's job go on that the scheduler holds back after a failed start."""

    stage: PlannedStage
    attempt: int
    reason: str


@dataclass(frozen=True)
class Pause:
    """Wait for room: nothing is lost, and it goes on by itself."""

    stage: PlannedStage
    reason: str


@dataclass(frozen=True)
class Fail:
    """Nothing more happens to the stage in this call; ``state`` is how it ends."""

    stage: PlannedStage
    outcome: Outcome
    state: ViewState


@dataclass(frozen=True)
class Block:
    """An input cannot be had in this call."""

    stage: PlannedStage
    by: str
    state: ViewState


Action = Done | Launch | Wait | CloseAttempt | Release | Pause | Fail | Block | Rest


@dataclass(frozen=True)
class StopWish:
    """Who wants a job to end, and how.

    ``everybody``: also jobs that another call has started.
    """

    reason: str
    failure: Literal["interrupted", "cancelled"] = "interrupted"
    grace_s: float = 60.0
    everybody: bool = False
