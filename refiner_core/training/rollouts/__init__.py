"""Prompts and tasks to rollouts with rewards and advantages.

In order of reading: ``policies`` (what samples, with which weights), ``rollout`` (answers of one
step: advantages, what is trained on and stored), ``lane`` (what a rollout is), ``episodes`` (the
same of episodes), ``pipeline`` (which batch is sampled when, and what is under way).
"""
