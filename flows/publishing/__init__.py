"""Publishing: a run's records become a card, and weights and card go to where people find them.

In: the work of a `publish` or `card` stage. Out: what lies at a target, and a report about it. The
card is a pure function of records (:mod:`refiner_core.cards`); here its facts are collected.
"""

from flows.publishing.facts import facts_of_stage
from flows.publishing.stages import publish, refresh_card

__all__ = ["facts_of_stage", "publish", "refresh_card"]
