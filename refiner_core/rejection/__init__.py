"""Rejection sampling: many attempts at each training prompt, the good ones to fine-tune on.

::

    prompts, tasks ─> attempts ─> scores ─> rule ─> kept ─> demonstrations, token by token

================ ==================================================================================
:mod:`.attempts` attempts as values and as rows of Parquet; which are kept, and a report of them
:mod:`.lanes`    what samples and scores a batch: answers of the refiner, episodes of an agent
:mod:`.stage`    batches, checkpoints, going on after an interruption; the stage
================ ==================================================================================
"""
