"""A judge that answers in its own threads, over any judge that answers at once.

For tests of callers, without a server: answers that are late, out of order, or errors. The judge
over HTTP has the same protocol.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from refiner_core.contract.types import Judge, Judgement, JudgeRequest, JudgeUsage
from refiner_core.judges import LexicalJudge


class ThreadedJudge:
    """Implements :class:`~refiner_core.contract.types.StreamingJudge`.

    Attributes
    ----------
    submitted
        Requests of each :meth:`submit`, in order.
    at_once
        Number of calls of :meth:`judge`.
    waited
        Number of submissions whose result a caller has awaited.
    gate
        Answers wait until it is set; it is set at the start.
    error
        Number of answered submissions, and the error that the following ones raise.
    """

    def __init__(self, judge: Judge | None = None) -> None:
        self._judge = judge or LexicalJudge()
        self.submitted: list[list[JudgeRequest]] = []
        self.at_once = self.waited = 0
        self.gate = threading.Event()
        self.gate.set()
        self.error: tuple[int, Exception] | None = None
        self._asked = self._failed = 0
        self._counting = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=4)

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        self.at_once += 1
        return self._answer(list(requests), 0)

    def submit(self, requests: Sequence[JudgeRequest]) -> Callable[[], list[Judgement]]:
        self.submitted.append(list(requests))
        number = len(self.submitted)
        future = self._pool.submit(self._answer, list(requests), number)

        def result() -> list[Judgement]:
            self.waited += 1
            return future.result()

        return result

    def fresh(self, mark: str) -> ThreadedJudge:  # it remembers nothing
        return self

    def usage(self) -> JudgeUsage:
        answers = {200: self._asked} if self._asked else {}
        return JudgeUsage(
            asked=self._asked,
            failed=self._failed,
            calls=self._asked,
            answers=answers,
            prompt_tokens=10 * self._asked,
            latency_s=0.5 * self._asked,
        )

    def _answer(self, requests: list[JudgeRequest], number: int) -> list[Judgement]:
        assert self.gate.wait(30), "the gate stayed closed"
        if self.error is not None and number > self.error[0]:
            raise self.error[1]
        judgements = self._judge.judge(requests)
        with self._counting:
            self._asked += len(requests)
            self._failed += sum(judgement.status == "failed" for judgement in judgements)
        return judgements
