"""Kinds that other stages wait for without reading their output."""

from refiner_core.contract.kinds.kind import Kind

#: The source that names the weights of a judge that refiner serves.
JUDGE_WEIGHTS = "judge.weights"
#: ``fetch``: models and data sets of a Hub into this machine's cache.
FETCH = Kind("fetch", order=0, run="flows.stages.fetch:run_fetch", section="data", part_of="(hub)")

#: ``serve``: a judge's server, while a stage uses it.
SERVE = Kind(
    "serve",
    order=30,
    run="flows.stages.judging:run_serve",
    section="judge",
    part_of="(judge)",
    hub_reads=(JUDGE_WEIGHTS,),
)

KINDS = (FETCH, SERVE)
