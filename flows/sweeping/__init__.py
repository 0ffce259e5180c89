"""Running sweeps: plan with the workspace's records, launch, watch, amend, end.

flows/cli/run ──> planning (sources), forecasting (history) ──> SweepPlan ──> launching
     admission: which trials may begin, canary first, within limits; an orchestrator runs them
     status: the same from records alone, for any shell and for the report
"""
