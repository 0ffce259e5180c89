"""An attempt from the inside: what the worker uses to run one stage once.

``attempt`` opens, runs and closes it, and waits for room; ``stage_io`` is what it writes besides
its output: log (without credentials), sign of life, metrics, rollouts, checkpoints.
"""
