"""Asking a judge what a report needs, each time as if for the first time.

In: a way to make a judge that knows nothing yet, and requests. Out: scores in order (None where it
failed), and what asking took: seconds and tokens by kind, failures by reason.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.types import Judge, JudgeRequest, JudgeUsage, StreamingJudge
from refiner_core.judges.usage import usage_of

#: A judge of this configuration whose store is empty.
MakeJudge = Callable[[JudgeConfig], Judge]

#: Calls in flight while seconds are measured: few, so that it is the server that is measured.
LANES = 8
#: Calls below which a percentile would be the largest value under another name.
_FEWEST = {50: 5, 95: 20, 99: 100}


@dataclass(frozen=True)
class Cost:
    """What judgements of one kind took.

    ``seconds`` maps a percentile to seconds of a call, with :data:`LANES` in flight; None where
    there were too few calls, and empty where no server was asked. ``reasons`` counts answers and
    tries without a usable judgement, those that were mended by another try too.
    """

    judgements: int
    failed: int
    calls: int
    timed: int
    seconds: dict[int, float | None]
    prompt_tokens: int
    completion_tokens: int
    reasons: dict[str, int] = field(default_factory=dict)


class Asker:
    """Asks judges of one configuration."""

    def __init__(
        self, config: JudgeConfig, make: MakeJudge, told: Callable[[str, int], None]
    ) -> None:
        self.config, self._make, self._told = config, make, told

    def ask(self, requests: Sequence[JudgeRequest], what: str) -> list[float | None]:
        """Scores of a judge that has no store. Errors as of :meth:`Judge.judge`."""
        if not requests:
            return []
        self._told(what, len(requests))
        judge = self._make(self.config)
        try:
            return [judgement.score for judgement in judge.judge(requests)]
        finally:
            _close(judge)

    def ask_timed(
        self, requests: Sequence[JudgeRequest], what: str
    ) -> tuple[list[float | None], dict[str, Cost]]:
        """The same, kind by kind, with what it takes."""
        scores: dict[int, float | None] = {}
        costs: dict[str, Cost] = {}
        for kind in dict.fromkeys(request.kind for request in requests):
            places = [i for i, request in enumerate(requests) if request.kind == kind]
            self._told(f"{what}, {kind}", len(places))
            found, costs[kind] = self._timed([requests[i] for i in places])
            scores |= dict(zip(places, found, strict=True))
        return [scores[i] for i in range(len(requests))], costs

    def _timed(self, requests: Sequence[JudgeRequest]) -> tuple[list[float | None], Cost]:
        judge = self._make(self.config)
        parts = _calls(requests, self.config)

        def one(part: list[int]) -> tuple[list[float | None], float]:
            began = time.perf_counter()
            judgements = judge.judge([requests[i] for i in part])
            return [j.score for j in judgements], time.perf_counter() - began

        try:
            with ThreadPoolExecutor(min(LANES, self.config.concurrency)) as lanes:
                answers = list(lanes.map(one, parts))
            used = usage_of(judge) or JudgeUsage()
        finally:
            _close(judge)
        scores: list[float | None] = [None] * len(requests)
        for part, (found, _) in zip(parts, answers, strict=True):
            for place, score in zip(part, found, strict=True):
                scores[place] = score
        seconds = sorted(s for _, s in answers) if isinstance(judge, StreamingJudge) else []
        return scores, Cost(
            judgements=len(requests),
            failed=sum(score is None for score in scores),
            calls=used.calls,
            timed=len(seconds),
            seconds={p: _percentile(seconds, p) for p in _FEWEST} if seconds else {},
            prompt_tokens=used.prompt_tokens,
            completion_tokens=used.completion_tokens,
            reasons=_reasons(used),
        )


def _calls(requests: Sequence[JudgeRequest], config: JudgeConfig) -> list[list[int]]:
    """Places of the requests that are one call; the same request is asked once."""
    batched = config.kind == "openai" and config.form == "batched"
    calls: dict[tuple[str, ...], list[int]] = {}
    for place, request in enumerate(requests):
        key: tuple[str, ...] = (request.kind, request.question, request.text)
        if not (batched and request.kind == "rubric"):
            key = (*key, request.reference)
        calls.setdefault(key, []).append(place)
    return list(calls.values())


def _percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least ``percent`` of them do not exceed."""
    if len(ordered) < _FEWEST[percent]:
        return None
    return ordered[math.ceil(percent / 100 * len(ordered)) - 1]


def _reasons(used: JudgeUsage) -> dict[str, int]:
    found = Counter({f"HTTP {status}": n for status, n in used.answers.items() if status != 200})
    found.update(used.lost)
    found.update(used.unusable)
    return dict(sorted(found.items()))


def _close(judge: Judge) -> None:
    """End threads and connections of a judge that has some."""
    close = getattr(judge, "close", None)
    if close is not None:
        close()
