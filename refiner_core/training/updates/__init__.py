"""Rollouts with advantages to new weights.

In order of reading: ``losses`` (the formulas, per token), ``step_batches`` (the batches of one
optimiser step on this rank), ``grpo_update`` (one step of GRPO).
"""
