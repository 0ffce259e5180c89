"""Rescoring: what stored rollouts would have been worth under other settings. Pure, torch-free.

In: rollouts as they were stored, with their judgements, and settings of reward and judge. Out: the
same rollouts' totals and advantages under each, how far they agree, tables and a figure.

``rollouts`` reads rows, ``questions`` says what would be asked and what is known already,
``scores`` gives totals and advantages, ``fidelity`` holds them against what was stored, ``compare``
and ``matrix`` make numbers of them, ``document`` and ``table`` and ``figure`` show those.
"""
