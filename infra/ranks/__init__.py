"""Several processes that train one stage, started by its attempt, and what goes between.

The worker stays the attempt. It starts an agent (:mod:`infra.ranks.agent`), on other nodes
through :mod:`infra.ranks.launch`, under the same minder as other trainers, so that none of them
outlives it. Rank 0 has the attempt's :class:`~refiner_core.contract.types.StageIO` over
:mod:`infra.ranks.bridge`; what ranks print and how they end comes up through their output, so that
neither a full disk nor a lost file can hide why they ended (:mod:`infra.ranks.protocol`).
"""
