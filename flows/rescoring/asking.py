"""Questions that the judges have to be asked for a rescoring, and asking them.

In: per judge the questions that no stored judgement answers. Out: their judgements, and a bill: how
many were known, kept in the workspace's store, asked, failed; tokens, seconds, money. Whatever was
judged is in the store, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.types import (
    Judge,
    Judgement,
    JudgementStore,
    JudgeRequest,
    JudgeUsage,
    StreamingJudge,
)
from refiner_core.rescoring.rollouts import Key, is_batched, keys_of

#: Questions that are handed to a judge at once are this many times what it asks at a time: a judge
#: idles for a moment at the end of each such piece.
_DEEP = 16
_LEAST = 512
#: Four characters a token: for an estimate before anything was asked.
_CHARACTERS_PER_TOKEN = 4.0


#: Prices per million tokens that are read and written, in whatever currency; None: nobody has said.
Prices = tuple[float | None, float | None]


@dataclass
class JudgePlan:
    """One judge, the questions of all settings that it judges, and what is known of them.

    ``known`` are the judgements that were stored with rollouts that this judge has judged, and
    ``unknown`` the questions that none of them answers, by setting and policy; ``calls``, ``kept``
    and ``prompt_tokens`` say what asking them means (of a judge that is not served: nothing).
    """

    name: str
    config: JudgeConfig
    identity: Mapping[str, Any]
    known: dict[Key, Sequence[Judgement]] = field(default_factory=dict)
    questions: set[Key] = field(default_factory=set)
    unknown: list[dict[Key, JudgeRequest]] = field(default_factory=list)
    calls: int = 0
    kept: int = 0
    prompt_tokens: int = 0

    @property
    def open(self) -> int:
        """How many questions no judgement stored with the rollouts answers."""
        return sum(map(len, self.unknown))

    @property
    def served(self) -> bool:
        """Yes where asking it takes calls."""
        return self.config.kind != "lexical"

    def need(self, requests: Sequence[JudgeRequest]) -> None:
        """Note what a policy's rollouts ask under one setting."""
        keys = keys_of(requests, batched=is_batched(self.config))
        asked = self.questions | self.known.keys()
        new = {k: r for k, r in zip(keys, requests, strict=True) if k not in asked}
        self.unknown.append(new)
        self.questions.update(keys)

    def count(self, store: JudgementStore | None) -> None:
        """See how many calls asking would take, given what the store has."""
        from refiner_core.judges.calls import plan_calls

        for asked in self.unknown:
            for call in plan_calls(list(asked.values()), self.config):
                known = store.get(call.keys) if store is not None else [None]
                if all(k is not None for k in known):
                    self.kept += len(call.keys)
                    continue
                self.calls += 1
                length = sum(len(message["content"]) for message in call.messages)
                self.prompt_tokens += round(length / _CHARACTERS_PER_TOKEN)


class Asking:
    """A judge that is asked each question once, by all settings together, some at a time.

    Parameters
    ----------
    tell
        Told how many judgements have come by now, of how many, each time that some do.
    """

    def __init__(self, plan: JudgePlan, judge: Judge, tell: Callable[[int, int], None]) -> None:
        self.plan, self._judge, self._tell = plan, judge, tell
        self._batched = is_batched(plan.config)
        self._answers: dict[Key, Judgement] = {}
        self._seconds = 0.0

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        """One judgement per request, in order.

        Raises
        ------
        JudgeOutage
            Nobody could be asked; what has been judged is kept.
        """
        began = time.monotonic()
        keys = keys_of(requests, batched=self._batched)
        new = {k: r for k, r in zip(keys, requests, strict=True) if k not in self._answers}
        for piece in pieces_of(new, max(_LEAST, _DEEP * self.plan.config.concurrency)):
            self._answers |= zip(piece, self._judge.judge(list(piece.values())), strict=True)
            self._tell(len(self._answers), self.plan.open)
        self._seconds += time.monotonic() - began
        return [self._answers[key] for key in keys]

    def bill(self, prices: Prices) -> dict[str, Any]:
        """Bill so far. ``questions`` are distinct: ``reused`` were stored with the rollouts,
        ``stored`` in the workspace's store, ``asked`` were put to the judge now; ``failed`` of
        those have no score."""
        judge, plan = self._judge, self.plan
        usage = judge.usage() if isinstance(judge, StreamingJudge) else JudgeUsage()
        tokens = (usage.prompt_tokens, usage.completion_tokens)
        cost = sum((price or 0) * n for price, n in zip(prices, tokens, strict=True)) / 1e6
        names = ("stored", "calls", "prompt_tokens", "completion_tokens")
        return {
            **{"judge": plan.name, "identity": plan.identity, "questions": len(plan.questions)},
            **{
                "reused": len(plan.questions) - plan.open,
                "asked": len(self._answers) - usage.stored,
            },
            **{name: getattr(usage, name) for name in names},
            "failed": sum(j.status == "failed" for j in self._answers.values()),
            "seconds": self._seconds,
            "cost": None if plan.served and prices == (None, None) else cost,
        }


def pieces_of(asked: Mapping[Key, JudgeRequest], size: int) -> Iterator[dict[Key, JudgeRequest]]:
    """Questions in their order, about ``size`` at a time; those about one answer, which may be one
    call, are not parted."""
    piece: dict[Key, JudgeRequest] = {}
    for _, group in groupby(asked.items(), key=lambda item: (item[1].question, item[1].text)):
        piece |= dict(group)
        if len(piece) >= size:
            yield piece
            piece = {}
    if piece:
        yield piece
