"""Servers that refiner starts: commands, keys, health, leases, and ending them.

``process`` (what is started, waited for and ended), ``judges`` (that of a judge, and those of a
workspace). A server is a child of a worker: of its own job (stage kind ``serve``),
where several jobs share it by leases, or of the job that asks it. Nothing here knows of stages;
:mod:`flows.stages.judging` does.
"""
