"""The store, endpoints and callbacks that a judge works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from refiner_core.contract.types import Endpoint, JudgementStore


@dataclass(frozen=True)
class Surroundings:
    """Resources that a judge may use besides its configuration.

    Attributes
    ----------
    store
        Where judgements are kept; none keeps them for the life of the judge.
    endpoints
        Where it may ask, looked up anew whenever no server answers (a server that refiner serves
        may come back elsewhere), from a thread of its own; none takes the configuration's
        addresses. They come with keys of their own: the user's (``judge.api_key_env``) goes to the
        configuration's addresses alone. What it raises ends the judging.
    should_stop
        Whether somebody wants it to end while it waits for servers.
    on_pause
        Told in words when all servers are gone, and with an empty text when one is back; like
        ``should_stop`` from the thread that waits for judgements.
    """

    store: JudgementStore | None = None
    endpoints: Callable[[], Sequence[Endpoint]] | None = None
    should_stop: Callable[[], bool] = lambda: False
    on_pause: Callable[[str], None] = lambda _: None
