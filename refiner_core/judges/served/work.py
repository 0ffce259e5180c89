"""What is to be judged, while it is judged: items (one call each) and batches (one submit each).

Items belong to the engine's thread. A batch is filled there and waited for elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.types import Judgement, JudgeRequest
from refiner_core.http.client import Flight
from refiner_core.http.fleet import Server
from refiner_core.judges.calls import Call, request_body

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Batch:
    """The requests of one submit, and what is known of them so far."""

    def __init__(self, requests: Sequence[JudgeRequest], limit_s: float) -> None:
        self.requests = tuple(requests)
        self.begun = time.monotonic()
        #: Monotonic seconds; moved on by the length of each pause.
        self.expires_at = self.begun + limit_s
        self.found: dict[JudgeRequest, Judgement] = {}
        self.stored: set[JudgeRequest] = set()
        #: Judgements that were scored by calls made for this batch.
        self.own = 0
        self.open: set[Item] = set()
        #: Calls that its caller has handed to the loop, and those that the loop has seen: each is
        #: counted by one thread alone.
        self.handed = self.taken = 0
        self.sealed = False
        self.over = threading.Event()
        self.error: BaseException | None = None

    def counts(self) -> dict[str, int]:
        """How its judgements came about, each counted once."""
        failed = sum(self.found[r].status == "failed" for r in self.requests)
        stored = sum(r in self.stored for r in self.requests)
        shared = len(self.requests) - failed - stored - self.own
        return {"stored": stored, "shared": shared, "failed": failed}


class Item:
    """One call on its way, whoever waits for it."""

    __slots__ = (
        "avoid",
        "best",
        "bodies",
        "call",
        "cut",
        "flight",
        "last",
        "left_s",
        "owner",
        "plain_at",
        "sent",
        "task",
        "tries",
        "waiting",
    )

    def __init__(self, call: Call, left_s: float, owner: Batch) -> None:
        self.call, self.left_s, self.owner = call, left_s, owner
        self.waiting: list[tuple[Batch, tuple[JudgeRequest, ...]]] = []
        #: Tries that counted, and all that were sent.
        self.tries = self.sent = 0
        self.last = "it was not asked yet"
        self.best: tuple[Judgement | None, ...] = ()
        #: The server that is asked only if there is no other: it has just failed.
        self.avoid: Server | None = None
        #: The server that did not take the schema and is asked again without one.
        self.plain_at: Server | None = None
        self.bodies: dict[bool, bytes] = {}
        self.flight: Flight | None = None
        self.task: asyncio.Task[Any] | None = None
        self.cut: Literal["", "timeout", "given_up"] = ""

    def body(self, config: JudgeConfig, *, structured: bool) -> bytes:
        """The request's body, made once."""
        made = self.bodies.get(structured)
        if made is None:
            made = _encode(request_body(self.call, config, structured=structured)).encode()
            self.bodies[structured] = made
        return made

    def failed(self, detail: str) -> tuple[Judgement, ...]:
        """What is left of it: what could be read of a batched reply, and failures."""
        failure = Judgement("failed", None, detail)
        known = self.best or (None,) * len(self.call.requests)
        return tuple(judgement or failure for judgement in known)

    def cut_short(self, why: Literal["timeout", "given_up"]) -> None:
        """End it wherever it is, unless it is ended already."""
        if self.task is not None and not self.cut:
            self.cut = why
            if self.task is not asyncio.current_task():  # which looks for itself
                self.task.cancel()

    def uncut(self) -> None:
        """Its cutting short was noticed and dealt with."""
        self.cut = ""
        if self.task is not None:
            self.task.uncancel()
