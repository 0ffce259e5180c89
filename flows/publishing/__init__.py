"""Publishing: a card from a run's records; weights and card to their target.

In: the work of a `publish` or `card` stage. Out: files at a target, and a report about them. The
card is a pure function of records (:mod:`refiner_core.cards`); this package collects its facts.
"""

from flows.publishing.facts import facts_of_stage
from flows.publishing.stages import publish, refresh_card

__all__ = ["facts_of_stage", "publish", "refresh_card"]
