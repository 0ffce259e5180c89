"""``export``: a checkpoint of a training that may still go on to weights in the Hub's layout."""

from refiner_core.contract.kinds.kind import MODEL_READS, Kind

KIND = Kind(
    "export",
    order=80,
    run="flows.stages.export:run_export",
    section="publish",
    part_of="publish",
    hub_reads=MODEL_READS,
)
