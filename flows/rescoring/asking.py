"""Questions that the judges have to be asked for a rescoring, and asking them.

In: per judge the questions that no stored judgement answers. Out: their judgements, and a
bill: how many were known, kept in the workspace's store, asked, failed; tokens, seconds,
money. Whatever was judged is in the store, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.types import (
    Judge,
    Judgement,
    JudgementStore,
    JudgeRequest,
    JudgeUsage,
    PendingJudgements,
    StreamingJudge,
)
from refiner_core.rescoring.rollouts import Key, is_batched, keys_of

#: Questions that are handed to a judge at once are this many times what it asks at a time.
_DEEP = 4
_LEAST = 512
#: Four characters a token: for an estimate before anything was asked.
_CHARACTERS_PER_TOKEN = 4.0


#: Prices per million tokens that are read and written, in whatever currency; None: nobody has said.
Prices = tuple[float | None, float | None]


@dataclass
class JudgePlan:
    """One judge, the questions of all settings that it judges, and what is known of them.

    ``known`` are the judgements that were stored with rollouts that this judge has judged, and
    ``unknown`` the questions that none of them answers; ``calls``, ``kept`` and ``prompt_tokens``
    say what asking them means (of a judge that is not served: nothing).
    """

    name: str
    config: JudgeConfig
    identity: Mapping[str, Any]
    known: dict[Key, Sequence[Judgement]] = field(default_factory=dict)
    questions: set[Key] = field(default_factory=set)
    unknown: dict[Key, JudgeRequest] = field(default_factory=dict)
    calls: int = 0
    kept: int = 0
    prompt_tokens: int = 0

    @property
    def reused(self) -> int:
        """Questions that judgements stored with the rollouts answer."""
        return len(self.questions) - len(self.unknown)

    @property
    def served(self) -> bool:
        """Yes where asking it takes calls."""
        return self.config.kind != "lexical"

    def need(self, requests: Sequence[JudgeRequest]) -> None:
        """Note what one rollout asks under one setting."""
        keys = keys_of(requests, batched=is_batched(self.config))
        for key, request in zip(keys, requests, strict=True):
            self.questions.add(key)
            if key not in self.known:
                self.unknown.setdefault(key, request)

    def count(self, store: JudgementStore | None) -> None:
        """See how many calls asking would take, given what the store has."""
        if not self.served or not self.unknown:
            return
        from refiner_core.judges.calls import plan_calls

        for _, requests in self.pieces():
            for call in plan_calls(requests, self.config):
                known = store.get(call.keys) if store is not None else [None]
                if all(k is not None for k in known):
                    self.kept += len(call.keys)
                    continue
                self.calls += 1
                length = sum(len(message["content"]) for message in call.messages)
                self.prompt_tokens += round(length / _CHARACTERS_PER_TOKEN)

    def pieces(self) -> Iterator[tuple[list[Key], list[JudgeRequest]]]:
        """The unknown questions in their order, some at a time. The rubrics of an answer, which
        may be one call, are not parted; and in no piece has an answer rubrics of two companies:
        with the batched form these are other questions."""
        size = max(_LEAST, _DEEP * self.config.concurrency)
        keys: list[Key] = []
        requests: list[JudgeRequest] = []
        companies: dict[tuple[str, str], Any] = {}
        for key, request in self.unknown.items():
            answer = (request.question, request.text)
            company = key[1] if isinstance(key, tuple) else companies.get(answer)
            full = len(keys) >= size and not _together(requests[-1], request)
            if full or companies.get(answer, company) != company:
                yield keys, requests
                keys, requests, companies = [], [], {}
            if isinstance(key, tuple):
                companies[answer] = company
            keys.append(key)
            requests.append(request)
        if keys:
            yield keys, requests


def ask(
    plan: JudgePlan, judge: Judge, prices: Prices, progress: Callable[[int, int], None]
) -> tuple[dict[Key, Judgement], dict[str, Any]]:
    """Put the unknown questions to the judge. The bill's ``questions`` are distinct: ``reused``
    were stored with the rollouts, ``stored`` in the workspace's store, ``asked`` were put to the
    judge now; ``failed`` of those have no score.

    Parameters
    ----------
    progress
        Told how many judgements have come by now, of how many, each time that some do.

    Raises
    ------
    JudgeOutage
        Nobody could be asked; what has been judged is kept.
    """
    before, began = _usage(judge), time.monotonic()
    answers: dict[Key, Judgement] = {}
    for keys, judgements in _in_flight(plan, judge):
        answers.update(zip(keys, judgements, strict=True))
        progress(len(answers), len(plan.unknown))
    after = _usage(judge)
    used = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("stored", "calls", "prompt_tokens", "completion_tokens")
    }
    tokens = [used["prompt_tokens"], used["completion_tokens"]]
    cost = sum((price or 0) * n for price, n in zip(prices, tokens, strict=True)) / 1e6
    bill = {
        **{"judge": plan.name, "identity": plan.identity, "questions": len(plan.questions)},
        **{"reused": plan.reused, **used, "asked": len(answers) - used["stored"]},
        "failed": sum(j.status == "failed" for j in answers.values()),
        "seconds": time.monotonic() - began,
        "cost": None if plan.served and prices == (None, None) else cost,
    }
    return answers, bill


def _usage(judge: Judge) -> JudgeUsage:
    return judge.usage() if isinstance(judge, StreamingJudge) else JudgeUsage()


def _in_flight(
    plan: JudgePlan, judge: Judge
) -> Iterator[tuple[Sequence[Key], Sequence[Judgement]]]:
    """Questions and their judgements, some at a time; a judge that streams has the next ones
    before the last ones are answered, so that it is never idle."""
    waiting: deque[tuple[list[Key], PendingJudgements]] = deque()
    for keys, requests in plan.pieces():
        if not isinstance(judge, StreamingJudge):
            yield keys, judge.judge(requests)
            continue
        waiting.append((keys, judge.submit(requests)))
        if len(waiting) > 1:
            first, pending = waiting.popleft()
            yield first, pending.result()
    for keys, pending in waiting:
        yield keys, pending.result()


def _together(a: JudgeRequest, b: JudgeRequest) -> bool:
    return a.kind == b.kind == "rubric" and (a.question, a.text) == (b.question, b.text)
