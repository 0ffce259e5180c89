"""Sweeps at work: planned with what is recorded, launched, watched, amended, ended.

flows/cli/sweep ──> planning (sources, history) ──> SweepPlan + forecast ──> launching
     supervisor: one campaign per trial, stepped in one thread; canary first; limits
     status: the same from records alone, for any shell and for the report
"""
