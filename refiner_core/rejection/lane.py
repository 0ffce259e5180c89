"""What samples and scores a batch: answers or episodes.

In: prompts. Out: attempts. See :mod:`.answers` and :mod:`.episodes`, which do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from refiner_core.contract.errors import RefinerError
from refiner_core.contract.types import DemonstrationRow, PromptRow
from refiner_core.rejection.attempts import Attempt, Key

#: Told of (attempts judged, attempts of the batch).
OnJudged = Callable[[int, int], None]
#: Told of (attempts finished, attempts of the batch).
OnFinished = Callable[[int, int], None]

#: Told of all attempts of a batch that are finished by now, where parts of it may be kept.
Keep = Callable[[Mapping[Key, Attempt]], None]


@dataclass(frozen=True)
class Begun:
    """Attempts that are sampled, in order of (prompt, number). ``judging``: somebody works on their
    rewards meanwhile; ``finish`` waits for it and gives them with their scores."""

    attempts: tuple[Attempt, ...]
    judging: bool
    finish: Callable[[OnJudged], list[Attempt]]


class PartlyDone(Exception):
    """A batch was cut short by ``why``, and these of its attempts are finished and may be kept."""

    def __init__(self, attempts: tuple[Attempt, ...], why: RefinerError) -> None:
        super().__init__(f"{len(attempts)} attempts of a batch are finished")
        self.attempts, self.why = attempts, why


class Lane(Protocol):
    """Samples and scores."""

    @property
    def name(self) -> str:
        """``answers`` or ``episodes``."""
        ...

    @property
    def keeps_parts(self) -> bool:
        """Whether attempts of a batch that was cut short may be kept."""
        ...

    def begin(
        self,
        prompts: Sequence[PromptRow],
        known: Sequence[Attempt],
        on_finished: OnFinished,
        should_stop: Callable[[], bool],
        keep: Keep,
    ) -> Begun:
        """Sample all attempts at these prompts that are not ``known`` from an earlier try. Where
        parts may be kept, ``keep`` is told after each.

        Raises
        ------
        PartlyDone
            A stop was asked for, or an error came, and what is finished may be kept.
        """
        ...

    def demonstration(self, prompt: PromptRow, attempt: Attempt) -> DemonstrationRow:
        """An attempt that is kept, as what is fine-tuned on."""
        ...


def demonstration_id(attempt: Attempt) -> str:
    """Its prompt's id and its number: ids of tasks begin with their domain, and so do these."""
    return f"{attempt.sample_id}#{attempt.index}"
