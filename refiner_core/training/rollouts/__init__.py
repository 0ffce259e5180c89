"""Prompts and tasks to rollouts with rewards and advantages.

In order of reading: ``policies`` (samplers and their weights), ``rollout`` (answers of one step:
advantages, training samples, stored rows), ``single_turn`` (the kind of a rollout), ``multi_turn``
(the same for episodes), ``pipeline`` (the sampling schedule and the batches in flight).
"""
