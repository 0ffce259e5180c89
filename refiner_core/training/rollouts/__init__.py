"""Prompts and tasks to rollouts with rewards and advantages.

In order of reading: ``policies`` (what samples, with which weights), ``rollout`` (answers of one
step: sampled, rewarded, stored), ``advantages`` (rewards of a group relative to each other),
``lane`` (what a rollout is), ``pipeline`` and ``in_flight`` (which batch is sampled when, and what
is under way). Episodes of tasks take the same way: ``episode_lane``, ``episodes``, ``credit``.
"""
