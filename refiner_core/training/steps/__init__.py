"""Steps of any training: health checks, checkpoints, stops and progress.

In order of reading: ``health`` (whether to make the update), ``checkpoints`` (between two steps:
save, stop, resume; progress and timing).
"""
