"""An attempt from the inside: what the worker uses to run one stage once.

``attempt`` opens, runs and closes it, with ``stage_io`` (metrics, rollouts, checkpoints, progress),
``heartbeat`` (its sign of life) and ``logs`` (what it says, without credentials).
"""
