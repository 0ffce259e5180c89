"""Checks of a plan before anything runs: files, programs, models, memory.

``sources`` (digests of a plan's inputs, unknown names), ``sets`` (rubric sets, protocols and
environments), ``models`` (would the model fail after hours; judges that reason), ``resources``
(GPUs, memory, programs), ``own_data`` (rows of users).
"""
