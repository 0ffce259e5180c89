"""Prompts and tasks to rollouts with rewards and advantages.

In order of reading: ``policies`` (samplers and their weights), ``rollout`` (answers of one step:
advantages, training samples, stored rows), ``lane`` (the kind of a rollout), ``episodes`` (the
same for episodes), ``pipeline`` (the sampling schedule and the batches in flight).
"""
