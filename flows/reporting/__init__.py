"""Reports of sweeps: gathered from records, compared, and written as page, Markdown and tables.

records ──> gather ──> Evidence ──> refiner_core.report ──> SweepReport ──> writing
"""
