"""Rejection sampling: many attempts at each training prompt, the good ones to fine-tune on.

::

    prompts, tasks ─> attempts ─> scores ─> rule ─> kept ─> demonstrations, token by token

================ ==================================================================================
:mod:`.attempts` attempts as values and as rows of Parquet; which are kept, and a report of them
:mod:`.stage`    the stage: what samples and scores batches, of answers or of an agent's episodes
================ ==================================================================================
"""
