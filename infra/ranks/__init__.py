"""Several processes that train one stage, and their communication with its attempt.

The worker remains the attempt. It starts an agent (:mod:`infra.ranks.agent`), on other nodes
through :mod:`infra.ranks.launch`, under the same watchdog as other trainers, so that none of them
outlives it. Rank 0 has the attempt's :class:`~refiner_core.contract.types.StageIO` over
:mod:`infra.ranks.bridge`. Output and ends of ranks come through their pipes, so that neither a full
disk nor a lost file can hide why they ended (:mod:`infra.ranks.messages`).
"""
