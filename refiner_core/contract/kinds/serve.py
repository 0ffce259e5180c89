"""``serve``: a judge's server, for as long as somebody asks it."""

from refiner_core.contract.kinds.kind import Kind

#: The source that names the weights of a judge that refiner serves.
JUDGE_WEIGHTS = "judge.weights"

KIND = Kind(
    "serve",
    order=30,
    run="flows.stages.judging:run_serve",
    section="judge",
    part_of="(judge)",
    hub_reads=(JUDGE_WEIGHTS,),
)
