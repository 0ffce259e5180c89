"""Reports of sweeps and runs: gathered from records, compared, and written as files.

records ──> Evidence ──> refiner_core.report ──> SweepReport ──> files
"""
