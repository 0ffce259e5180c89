"""Rescoring of stored rollouts under other settings. Pure, torch-free.

In: stored rollouts with their judgements, and settings of reward and judge. Out: the
rollouts' totals and advantages under each setting, their agreement.

``rollouts`` reads rows, finds the questions and the known judgements, computes totals and
advantages and compares them, with the stored ones and those of other settings.
"""
