"""Reports: what the arms of a sweep, or the stages of a run, have shown, as one document and as
pages made of it.

    records ── flows/reporting ──> evidence ── comparing ──> SweepReport (values, JSON)
                                └────────────────────────> RunReport
    a report ──> html (one self-contained page), markdown; of a sweep also table (CSV)

``sweep`` and ``run`` each have a document and a page. What both pages share lies here: style and
script (``base.css``, ``base.js``), policy and templates (``pages``), drawings, transcripts, how
numbers are printed. Pure functions of values: nothing here reads a workspace.
"""
