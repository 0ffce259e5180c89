"""What an answer means for the call, and what it says about its server. Pure.

==================================== ======== ==========================================
answer                               server   call
==================================== ======== ==========================================
200 with judgements                  well     scored
200 without                          well     again, or failed where that would not help
408, 429                             busy     again
502, 503, 504, connection lost       gone     again
other 5xx                            sick     again
anything else                        well     failed
==================================== ======== ==========================================
"""

from __future__ import annotations

from typing import NamedTuple

from refiner_core.contract.types import Judgement
from refiner_core.http.breaker import Trouble
from refiner_core.http.client import Answered, Lost
from refiner_core.judges.calls import Call, Reply, read_reply

_BUSY = frozenset({408, 429})
_GONE = frozenset({502, 503, 504})
_LOST = {
    "refused": "no connection",
    "connection": "the connection was lost",
    "truncated": "the reply broke off",
    "too_long": "the reply is too long",
    "timeout": "no answer in time",
}
_TROUBLE_OF_LOST = {"too_long": Trouble.NONE, "timeout": Trouble.SICK}


class Outcome(NamedTuple):
    """``judgements`` where scored; else why not, and whether that is the last word.

    ``unusable`` counts it if it was a 200 without judgements; ``partial`` is what could be read,
    ``tokens`` what it took to read and to write, also where nothing came of it; ``served`` is what
    the server says that it is.
    """

    trouble: Trouble
    judgements: tuple[Judgement, ...] | None = None
    reason: str = ""
    final: bool = False
    unusable: str = ""
    partial: tuple[Judgement | None, ...] = ()
    tokens: tuple[int, int] = (0, 0)
    served: str = ""


def outcome_of(answer: Answered | Lost, call: Call) -> Outcome:
    """Read an answer."""
    if isinstance(answer, Lost):
        trouble = _TROUBLE_OF_LOST.get(answer.reason, Trouble.GONE)
        words = f"{_LOST[answer.reason]}{f' ({answer.error})' if answer.error else ''}"
        return Outcome(trouble, reason=words, unusable=answer.reason)
    status = answer.status
    if status == 200:
        return _read(answer.raw, call)
    reason = f"HTTP {status}"
    if status in _BUSY:
        return Outcome(Trouble.BUSY, reason=reason)
    if status >= 500:
        return Outcome(Trouble.GONE if status in _GONE else Trouble.SICK, reason=reason)
    return Outcome(Trouble.NONE, reason=reason, final=True)


def _read(raw: bytes, call: Call) -> Outcome:
    reply = read_reply(raw, call)
    tokens = (reply.prompt_tokens, reply.completion_tokens)
    if isinstance(reply, Reply):
        return Outcome(Trouble.NONE, reply.judgements, tokens=tokens, served=reply.served)
    return Outcome(
        Trouble.NONE,
        reason=reply.detail,
        final=reply.final,
        unusable=reply.reason,
        partial=reply.partial,
        tokens=tokens,
    )
