"""``fetch``: models and data sets of a Hub into this machine's cache."""

from refiner_core.contract.kinds.kind import Kind

KIND = Kind("fetch", order=0, run="flows.stages.fetch:run_fetch", section="data", part_of="(hub)")
