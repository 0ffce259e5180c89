"""Reports: what the arms of a sweep have shown, as one document and as pages made of it.

    records ── flows/reporting ──> evidence ── comparing ──> SweepReport (values, JSON)
                                                               ├─ html      one self-contained page
                                                               ├─ markdown
                                                               └─ table     CSV

Pure functions of values: nothing here reads a workspace.
"""
