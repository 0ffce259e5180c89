"""Rejection sampling: many attempts at each training prompt, the good ones kept for fine-tuning.

::

    prompts, tasks ─> attempts ─> scores ─> rule ─> kept ─> demonstrations, token by token

================ ==================================================================================
:mod:`.attempts` attempts as values and as rows of Parquet; selection, and its report
:mod:`.stage`    the stage: sampling and scoring of batches, of answers or of an agent's episodes
================ ==================================================================================
"""
