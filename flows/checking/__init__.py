"""Checks of a plan before anything runs: files, programs, models, memory.

``sources`` (digests of a plan's inputs, unknown names), ``sets`` (rubric sets, protocols and
environments), ``models`` (would the model fail after hours), ``judges`` (judges that reason),
``resources`` (memory, time, programs), ``gpus`` (how many at the same time, and who sits where),
``own_data`` (rows of users).
"""
