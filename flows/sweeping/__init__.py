"""Sweeps at work: planned with what is recorded, launched, watched, amended, ended.

flows/cli/run ──> planning (sources), forecasting (history) ──> SweepPlan ──> launching
     admission: which trials may begin, canary first, within limits; an orchestrator works on them
     status: the same from records alone, for any shell and for the report
"""
