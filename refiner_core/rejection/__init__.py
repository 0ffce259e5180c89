"""Rejection sampling: many attempts at each training prompt, the good ones to fine-tune on.

::

    prompts, tasks ─> attempts ─> scores ─> rule ─> kept ─> demonstrations, token by token

==================== ==============================================================================
:mod:`.selection`    the rule: which attempts at a prompt are kept, and why the others are not
:mod:`.attempts`     an attempt as a value, and as a row of Parquet
:mod:`.lane`         what samples and scores a batch of attempts
:mod:`.answers`      attempts of the refiner: one answer each, scored by rewards
:mod:`.episodes`     attempts of an agent: one episode each, scored by its environment
:mod:`.work`         batches, checkpoints, going on after an interruption
:mod:`.report`       what was sampled and kept
:mod:`.stage`        the stage
==================== ==============================================================================
"""
