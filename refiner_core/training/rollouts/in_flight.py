"""Batches of rollouts that are under way: what they hold, and how a checkpoint keeps them.

In: batches that are sampled, and judged or not. Out: bytes of a checkpoint's further file, and the
same batches again. Plain JSON, no pickle: Python writes floats so that they come back bit by bit.

A batch in flight was sampled with weights older than the checkpoint's, so it cannot be sampled
again: tokens and log-probabilities are kept. Results that are there are kept too, since a judge
need not say the same thing twice; what is not judged yet is asked when the run goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.types import Completion, PromptRow, RewardResult
from refiner_core.training.rollouts.rollout import Key, RolloutRewards, Sampled, Sampler

#: The checkpoint's file, and the version of what it holds.
IN_FLIGHT = "in_flight.json"
FORMAT_VERSION = 1


@dataclass
class Round:
    """Prompts that are sampled together: a step's only round, but with active sampling.

    ``made`` has this rank's own completions by place, and ``read`` the samples of them on rank 0;
    ``samples`` is complete on rank 0 once all are collected, and ``results`` once they are judged.
    """

    indices: tuple[int, ...]
    keys: list[Key]
    made: dict[int, Completion] = field(default_factory=dict)
    read: dict[int, Sampled] = field(default_factory=dict)
    future: Future[None] | None = None
    collected: bool = False
    samples: list[Sampled] = field(default_factory=list)
    rewards: RolloutRewards | None = None
    results: list[RewardResult] | None = None


@dataclass
class Flight:
    """A step's batch of rollouts, from its first prompt to its update.

    ``version`` counts the training steps behind the weights that sampled it; ``epoch`` and
    ``cursor`` say where the data stand after its last prompt. ``settled``: active sampling has done
    with it; ``cut_short``: an error has ended that. ``lost``: too many of its episodes ended by an
    error of the infrastructure; no checkpoint keeps it, and it is sampled again.
    """

    step: int
    version: int
    epoch: int
    cursor: int
    rounds: list[Round] = field(default_factory=list)
    settled: bool = False
    cut_short: bool = False
    lost: bool = False
    seconds: float = 0.0

    @property
    def age(self) -> int:
        """Training steps between the weights that sampled it and those that it is to train."""
        return self.step - 1 - self.version

    @property
    def size(self) -> int:
        """Samples, on all ranks."""
        return sum(len(part.keys) for part in self.rounds)

    @property
    def samples(self) -> list[Sampled]:
        """All rounds' samples (rank 0's)."""
        return [sample for part in self.rounds for sample in part.samples]

    @property
    def results(self) -> list[RewardResult]:
        """All rounds' results (rank 0's), once they are judged."""
        return [result for part in self.rounds for result in part.results or ()]


def to_bytes(flights: Sequence[Flight]) -> bytes:
    """What a checkpoint keeps of batches that are sampled."""
    value = {"format": FORMAT_VERSION, "flights": [_flight_to_json(f) for f in flights]}
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def from_bytes(
    data: bytes, prompts: Sequence[PromptRow], sampler: Sampler, where: str
) -> list[Flight]:
    """The batches again.

    Raises
    ------
    WorkspaceError
        The file is of another format.
    """
    try:
        value = json.loads(data)
        if value["format"] != FORMAT_VERSION:
            raise ValueError(f"format {value['format']}")
        return [_flight_from_json(each, prompts, sampler) for each in value["flights"]]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise WorkspaceError(
            f"{IN_FLIGHT} of {where} cannot be read ({type(error).__name__}: {error})",
            expected=f"rollouts in flight, format {FORMAT_VERSION}",
            fix="remove the checkpoint to go on from the one before it",
        ) from error


def _flight_to_json(flight: Flight) -> dict[str, Any]:
    rounds = [
        {
            "prompts": list(part.indices),
            "samples": [_completion(sample.completion) for sample in part.samples],
            "results": None if part.results is None else [_result(r) for r in part.results],
        }
        for part in flight.rounds
    ]
    names = ("step", "version", "epoch", "cursor", "settled")
    return {**{name: getattr(flight, name) for name in names}, "rounds": rounds}


def _completion(completion: Completion) -> list[Any]:
    """Tokens, log-probabilities and end; of an episode also whose tokens they are, and its
    record."""
    plain = [list(completion.token_ids), list(completion.logprobs), completion.finish_reason]
    if completion.own is None:
        return plain
    logprobs = [
        p if own else None for p, own in zip(completion.logprobs, completion.own, strict=True)
    ]
    return [plain[0], logprobs, plain[2], [int(own) for own in completion.own], completion.episode]


def _completion_again(
    token_ids: list[int],
    logprobs: list[float | None],
    reason: Literal["stop", "length"],
    own: list[int] | None = None,
    episode: Mapping[str, Any] | None = None,
) -> Completion:
    whose = None if own is None else tuple(bool(value) for value in own)
    known = tuple(math.nan if p is None else p for p in logprobs)
    return Completion(tuple(token_ids), known, reason, whose, episode)


def _result(result: RewardResult) -> dict[str, Any]:
    return {
        "status": result.status,
        "total": result.total,
        "components": dict(result.components),
        "judgements": [dict(judgement) for judgement in result.judgements],
    }


def _flight_from_json(
    value: Mapping[str, Any], prompts: Sequence[PromptRow], sampler: Sampler
) -> Flight:
    flight = Flight(value["step"], value["version"], value["epoch"], value["cursor"])
    flight.settled = value["settled"]
    for part in value["rounds"]:
        keys = sampler.keys([(index, prompts[index]) for index in part["prompts"]])
        completions = [_completion_again(*values) for values in part["samples"]]
        samples = [sampler.sampled(k, c) for k, c in zip(keys, completions, strict=True)]
        results = part["results"]
        made = None if results is None else [RewardResult(**result) for result in results]
        indices = tuple(part["prompts"])
        flight.rounds.append(Round(indices, keys, collected=True, samples=samples, results=made))
    return flight
