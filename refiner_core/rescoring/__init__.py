"""Rescoring: the worth of stored rollouts under other settings. Pure, torch-free.

In: rollouts as they were stored, with their judgements, and settings of reward and judge. Out: the
same rollouts' totals and advantages under each, how far they agree, tables.

``rollouts`` reads rows, says what would be asked and what is known already, gives totals and
advantages and holds them against what was stored; ``compare`` makes numbers of them, ``document``
shows those.
"""
