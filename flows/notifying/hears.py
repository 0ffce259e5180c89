"""Who hears how a call stands, besides the terminal and Prefect, and may tell somebody.

A :class:`Hears` never raises and never waits, except in ``close``, and there only for so long:
telling somebody is no part of the work.
"""

from __future__ import annotations

from collections.abc import Mapping

from refiner_core.contract.views import StageView


class Hears:
    """What is asked of who tells somebody; this one tells nobody."""

    def show(self, views: Mapping[str, StageView]) -> None:
        """How all stages are now."""

    def asked_to_stop(self, why: str) -> None:
        """Somebody wants it to end."""

    def over(self, views: Mapping[str, StageView]) -> None:
        """Nothing more will happen."""

    def broke(self, error: BaseException) -> None:
        """The work on it has ended with an error."""

    def close(self) -> None:
        """Wait a while for what is on its way."""


#: Where no channel is named.
Nobody = Hears
