"""A judge on one or several OpenAI-compatible servers.

In: judge requests. Out: judgements, in order; a request that cannot be judged ends as ``failed``,
never as a number.

::

    submit ─ plan ─> engine: one event loop in its own thread ─> judgements
                                 │ known in the store: not asked
                                 │ scored: stored immediately
                                 └ all servers gone: pause ─> resume, or JudgeOutage

Scores are stored immediately, so that interrupted work loses nothing. A judge may be used from any
thread, including one that runs an event loop.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted
from refiner_core.contract.types import Endpoint, Judgement, JudgeRequest, JudgeUsage
from refiner_core.http.client import LoopThread, authorization
from refiner_core.http.fleet import BreakerSettings
from refiner_core.judges.calls import marked, plan_calls
from refiner_core.judges.context import JudgeContext, MemoryStore, UsageCounts
from refiner_core.judges.engine import JudgeBatch, JudgeEngine
from refiner_core.judges.prompting import load_judge_prompts

#: Interval at which waiting callers check for a pause and a stop, seconds.
_LOOK_S = 0.1


class OpenAIJudge:
    """Implements :class:`~refiner_core.contract.types.StreamingJudge` over HTTP.

    Parameters
    ----------
    config
        ``base_url`` or ``base_urls`` is required if ``around`` has no endpoints.
        ``max_retries`` counts the tries after the first; tries that fail because a server is gone
        do not count.
    around
        Store, endpoints, stop and pause; see :class:`~refiner_core.judges.JudgeContext`.
    first_backoff_s
        Longest wait after the first failed try; it doubles with each, up to 30 s, and the wait is
        drawn from 0 to it.
    breaker
        When a server is left out, and for how long.

    Raises
    ------
    ConfigurationError
        No usable address, or unreadable prompts.
    """

    def __init__(
        self,
        config: JudgeConfig,
        around: JudgeContext | None = None,
        *,
        first_backoff_s: float = 0.5,
        breaker: BreakerSettings | None = None,
    ) -> None:
        self._around = around or JudgeContext()
        _check_addresses(config, self._around)
        # Unreadable prompts are refused now, not at step 1.
        self._prompts = load_judge_prompts(config.prompt, config.form)
        self._config = config
        self._store = self._around.store or MemoryStore()
        self._counts = UsageCounts()
        self._pace = first_backoff_s, breaker or BreakerSettings()
        self._starting, self._telling = threading.Lock(), threading.Lock()
        self._engine: JudgeEngine | None = None
        self._thread: LoopThread | None = None
        self._told = ""
        self._process, self._closed = os.getpid(), False
        self._mark = ""
        #: The judge that owns the thread, if this one only has another mark.
        self._whole: OpenAIJudge | None = None

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        """One judgement per request, in order. Errors: see :meth:`submit`."""
        return self.submit(requests)() if requests else []

    def submit(self, requests: Sequence[JudgeRequest]) -> Callable[[], list[Judgement]]:
        """Start judging; stored judgements and running calls are reused.

        Calling what comes back waits for the batch and gives its judgements in order;
        it raises JudgeOutage, Interrupted or ConfigurationError where there are none.

        Raises
        ------
        ConfigurationError
            The key in the environment cannot be sent in a header.
        RuntimeError
            The judge was closed, or belongs to the process that this one was forked from.
        """
        thread, engine = self._running()
        batch = JudgeBatch(requests, self._config.batch_timeout_s)
        self._counts.add(asked=len(requests))
        calls = plan_calls(batch.requests, self._config, self._prompts)
        thread.call(engine.begin, batch, marked(calls, self._mark) if self._mark else calls)
        return functools.partial(self._wait, batch)

    def fresh(self, mark: str) -> OpenAIJudge:
        """The same judge without its memory, under this mark (and that of the judge itself); see
        :class:`~refiner_core.contract.types.StreamingJudge`."""
        self._running()
        twin = copy.copy(self)
        twin._mark, twin._whole = "\x1e".join(filter(None, (self._mark, mark))), self
        return twin

    def usage(self) -> JudgeUsage:
        """Usage since it was created."""
        return self._counts.snapshot()

    def close(self) -> None:
        """End the thread and the connections; waiting callers get an error."""
        self._closed = True
        if self._thread is not None:
            self._thread.end()
            self._store.flush()

    def __enter__(self) -> OpenAIJudge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- waiting callers

    def _wait(self, batch: JudgeBatch) -> list[Judgement]:
        try:
            while not batch.over.wait(_LOOK_S):
                self._look(batch)
        except BaseException as error:
            thread, engine = self._thread, self._engine
            assert thread is not None
            assert engine is not None
            with contextlib.suppress(RuntimeError):  # it was closed: nothing to drop
                thread.call(engine.drop, batch, error)
            self._store.flush()
            raise
        finally:
            self._tell()
        if batch.error is not None or self._engine is None or self._engine.idle:
            # Not after each of many small batches: scores are in the store already.
            self._store.flush()
        if batch.error is not None:
            raise batch.error
        return [batch.found[request] for request in batch.requests]

    def _look(self, batch: JudgeBatch) -> None:
        self._tell()
        if self._told and self._around.should_stop():
            raise Interrupted(
                "Stopped on request while waiting for the judge's servers",
                expected="servers that answer again",
                fix="start them and run the same command again; all judgements are kept",
            )

    def _tell(self) -> None:
        text = self._engine.pause if self._engine is not None else ""
        with self._telling:
            changed, self._told = text != self._told, text
            if changed:
                self._around.on_pause(text)

    # ---- before the engine starts

    def _running(self) -> tuple[LoopThread, JudgeEngine]:
        if os.getpid() != self._process:
            raise RuntimeError("a judge cannot be used in a forked process; make one there")
        if self._around.endpoints is None:
            authorization(Endpoint(""), self._config.api_key_env)  # refused here, not per call
        with self._starting:
            if self._closed:
                raise RuntimeError("the judge was closed")
            if self._thread is None or self._engine is None:
                engine = JudgeEngine(
                    self._config, self._around, self._store, self._counts, *self._pace
                )
                hooks = (engine.open, engine.close, engine.fail)
                self._engine, self._thread = engine, LoopThread("refiner-judge", *hooks)
                weakref.finalize(self, self._thread.end)
            return self._thread, self._engine


def _check_addresses(config: JudgeConfig, around: JudgeContext) -> None:
    addresses = [a for a in (config.base_url, *config.base_urls) if a]
    usable = all(address.startswith(("http://", "https://")) for address in addresses)
    if usable and (addresses or around.endpoints is not None):
        return
    raise ConfigurationError(
        "The openai judge has no usable `base_url`",
        expected="the address of a server, such as http://127.0.0.1:8000/v1",
        fix="set judge.base_url to it",
    )
