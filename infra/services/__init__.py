"""Servers that refiner starts: commands, keys, health, leases, and their ends.

``process`` (starts, awaits and ends a server), ``judges`` (a judge's server, and those of a
workspace). A server is a child of a worker: of its own job (stage kind ``serve``), if several jobs
share it by leases, or of the job that uses it. Stages are handled in
:mod:`flows.stages.judging`.
"""
