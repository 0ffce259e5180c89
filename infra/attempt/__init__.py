"""An attempt from the inside: the worker's tools to run one stage once.

``attempt`` opens, runs and closes it, and waits for space; ``stage_io`` writes everything besides
its output: log (without credentials), heartbeat, metrics, rollouts, checkpoints.
"""
